# SPDX-License-Identifier: Apache-2.0
"""Answers are those of a plain loop over the logits of the whole model, in every layout.

As a program this file is one of the processes.
"""

import json
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mindvl_data import DataError, SourceConfig
from mindvl_model import set_up_device
from mindvl_model.parallel_config import ParallelConfig
from mindvl_model.testing.ranks import run_ranks
from mindvl_model.testing.tiny import smallest_config, smallest_qwen3_moe
from mindvl_train import ModelSection, RunConfig, run_training
from mindvl_train.validation.config import GenerationConfig, ValidationConfig

pytestmark = pytest.mark.slow

Make = Callable[..., RunConfig]
MOST = 5


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    noise = np.random.default_rng(5).integers(0, 256, (56, 84, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.png")
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "abc?"}, {"prompt": "what?", "images": ["noise.png"], "expected": "17"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def generations(config: RunConfig) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (config.out / "validation.jsonl").read_text().splitlines()]
    found: list[dict[str, Any]] = lines[-1]["generations"]
    return found


def with_generations(config: RunConfig, held_out: tuple[SourceConfig, ...], prompts: Path) -> RunConfig:
    wanted = GenerationConfig(prompts=prompts, first_samples=1, max_new_tokens=MOST)
    validation = ValidationConfig(sources=held_out, every_steps=1, max_packs=1, generations=wanted)
    schedule = replace(config.schedule, peak_lr=0.0, min_lr=0.0)
    return replace(config, validation=validation, schedule=schedule)


def by_hand(config: RunConfig, checkpoint: Path, held_out: tuple[SourceConfig, ...], prompts: Path) -> list[str]:
    """Greedy answers from the logits of the last position, with the whole prefix each time."""
    from mindvl_data import SourceIndex, load_tokenizer
    from mindvl_data.order.sources import source_rules
    from mindvl_data.prompts import first_prompts, plain_text, prompt_batch, read_prompts
    from mindvl_data.shards.files import ShardFiles
    from mindvl_train.checkpoints.restore import load_weights
    from mindvl_train.parallel_state import process_groups
    from mindvl_train.resolved_run import resolve_run, with_tokenizer
    from mindvl_train.weights import build_models

    run, data = with_tokenizer(resolve_run(config, 1)), config.data
    tokenizer, files = load_tokenizer(data.tokenizer), ShardFiles(data.store)
    everything = read_prompts(prompts, rules=source_rules(held_out[0], data), tokenizer=tokenizer)
    for source in held_out:
        everything += first_prompts(SourceIndex(source, data, tokenizer, files), 1, tokenizer=tokenizer)
    answers = []
    with process_groups(set_up_device(), seed=0) as ranks, torch.no_grad():
        (model,) = build_models(run, ranks.device, load_init=False)
        load_weights(checkpoint, model)
        model.eval()
        for prompt in everything:
            ids: list[int] = []
            while len(ids) < MOST and ids[-1:] != [run.model.tokens.end_of_turn]:
                batch = prompt_batch(
                    prompt, ids, config=data, tokenizer=tokenizer, position_kind=run.model.position_kind
                )
                inputs = batch.model_inputs()
                for name in ("labels", "loss_positions"):
                    del inputs[name]
                last = len(prompt.sample.input_ids) + len(ids) - 1
                ids.append(int(model.logits(**inputs)[last].argmax()))
            answers.append(plain_text(ids, tokenizer))
    return answers


@pytest.mark.multi
def test_answers_are_the_most_likely_tokens_in_every_layout(
    make_config: Make, held_out: tuple[SourceConfig, ...], prompts: Path, tmp_path: Path
) -> None:
    deep, experts = smallest_config(vocab_size=264), smallest_qwen3_moe(vocab_size=264)
    deep = replace(deep, language=replace(deep.language, num_layers=4))

    def config(out: str, model: Any, parallel: ParallelConfig | None = None) -> RunConfig:
        section = ModelSection(vision=model.vision, language=model.language)
        made = make_config(out, steps=1, model=section, global_batch_size=4, parallel=parallel or ParallelConfig())
        return with_generations(made, held_out, prompts)

    alone = {"dense": config("one", deep), "experts": config("one-experts", experts)}
    for one in alone.values():
        result = run_training(one)
        found = generations(one)
        assert [line["answer"] for line in found] == by_hand(one, result.checkpoint, held_out, prompts)
        assert [line["expected"] for line in found][1] == "17"
        assert [line["name"] for line in found][:2] == [f"{prompts}:1", f"{prompts}:2"]
        assert len({line["answer"] for line in found}) > 1
    layouts = {
        "tp2": ParallelConfig(tp_size=2),
        "pp2": ParallelConfig(pp_size=2),
        "pp2vpp2": ParallelConfig(pp_size=2, virtual_stages=2),
        "cp2": ParallelConfig(cp_size=2),
        "dp2": ParallelConfig(),
    }
    many = [(config(name, deep, parallel), alone["dense"]) for name, parallel in layouts.items()]
    many.append((config("ep2", experts, ParallelConfig(ep_size=2)), alone["experts"]))
    job = tmp_path / "job"
    job.write_bytes(pickle.dumps([run for run, _ in many]))
    imports = ("mindvl_train.weights", "mindvl_train.loop", "transformers")
    run_ranks([__file__, str(job)], 2, timeout_s=300, imports=imports)
    for run, expected in many:
        assert generations(run) == generations(expected), run.out.name


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "is not valid JSON"),
        ('{"text": "a"}', 'must be an object with a text "prompt"'),
        ('{"prompt": "a", "image": "b.png"}', "has the unknown key 'image', known keys are expected, images, prompt"),
        ('{"prompt": "a", "images": ["gone.png"]}', "gone.png"),
        ('{"prompt": "' + 200 * "a " + '"}', "more than data.packing.seq_length=96"),
    ],
)
def test_a_line_that_is_no_prompt_is_refused_by_its_number(
    make_config: Make, held_out: tuple[SourceConfig, ...], tmp_path: Path, line: str, why: str
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n\n' + line + "\n")
    config = with_generations(make_config(steps=1), held_out, path)
    with pytest.raises(DataError) as error:
        run_training(config)
    assert f"{path}:3: " in str(error.value)
    assert why in str(error.value)


if __name__ == "__main__":
    for given in pickle.loads(Path(sys.argv[1]).read_bytes()):
        run_training(given)
    os._exit(0)
