# SPDX-License-Identifier: Apache-2.0
"""Validation gives one result in every parallel layout, and training does not notice it in any.

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

import pytest
import torch

from mindvl_data import SourceConfig
from mindvl_model.parallel_config import ParallelConfig
from mindvl_model.testing.ranks import run_ranks
from mindvl_model.testing.tiny import smallest_config, smallest_deepseek_v3, smallest_qwen3_moe
from mindvl_train import CheckpointConfig, ModelSection, RunConfig, run_training
from mindvl_train.validation.config import ValidationConfig

pytestmark = pytest.mark.slow

LOSS_TOLERANCE = 1e-5  # relative, fp32; sums of layouts are added in another order
DENSE = {
    "dp2": ParallelConfig(),
    "tp2": ParallelConfig(tp_size=2),
    "pp2": ParallelConfig(pp_size=2),
    "pp2vpp2": ParallelConfig(pp_size=2, virtual_stages=2),
    "cp2": ParallelConfig(cp_size=2),
}


def validations(config: RunConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (config.out / "validation.jsonl").read_text().splitlines()]


def in_two(configs: list[RunConfig], directory: Path) -> None:
    """Run the configurations in turn in two processes."""
    job = directory / "job.pickle"
    job.write_bytes(pickle.dumps(configs))
    imports = ("mindvl_train.weights", "mindvl_train.loop", "transformers")
    run_ranks([__file__, str(job)], 2, timeout_s=400, imports=imports)


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name in ("step", "packs", "samples", "loss_tokens", "failed_samples"):
        assert one[name] == other[name], name
    for name in ("loss", "token_accuracy"):
        assert one[name] == pytest.approx(other[name], rel=LOSS_TOLERANCE)
    for name in ("loss_by_source", "token_accuracy_by_source"):
        assert one[name] == pytest.approx(other[name], rel=LOSS_TOLERANCE)


@pytest.mark.multi
def test_every_layout_has_the_losses_of_one_process(
    make_config: Callable[..., RunConfig], held_out: tuple[SourceConfig, ...], tmp_path: Path
) -> None:
    def config(out: str, model: Any, **changes: Any) -> RunConfig:
        section = ModelSection(vision=model.vision, language=model.language)
        validation = ValidationConfig(sources=held_out, every_steps=1, max_packs=changes.pop("max_packs", None))
        made = make_config(out, steps=1, model=section, validation=validation, global_batch_size=4, **changes)
        return replace(made, schedule=replace(made.schedule, peak_lr=0.0, min_lr=0.0))

    deep = smallest_config(vocab_size=264)
    deep = replace(deep, language=replace(deep.language, num_layers=4))
    experts, latent = smallest_qwen3_moe(vocab_size=264), smallest_deepseek_v3(vocab_size=264)
    alone = {
        "dense": config("one", deep),
        "bounded": config("one-bounded", deep, max_packs=5),
        "experts": config("one-experts", experts),
        "latent": config("one-latent", latent),
    }
    for one in alone.values():
        run_training(one)
    many = {(f"dense-{name}", "dense"): config(name, deep, parallel=layout) for name, layout in DENSE.items()}
    many[("bounded-dp2", "bounded")] = config("bounded-dp2", deep, max_packs=5)
    many[("bounded-pp2", "bounded")] = config("bounded-pp2", deep, max_packs=5, parallel=ParallelConfig(pp_size=2))
    many[("experts-ep2", "experts")] = config("ep2", experts, parallel=ParallelConfig(ep_size=2))
    many[("latent-ep2", "latent")] = config("latent-ep2", latent, parallel=ParallelConfig(ep_size=2))
    many[("latent-pp2", "latent")] = config("latent-pp2", latent, parallel=ParallelConfig(pp_size=2))
    in_two(list(many.values()), tmp_path)
    for (_, kind), one in many.items():
        (found,), (expected,) = validations(one), validations(alone[kind])
        same(found, expected)
    assert validations(alone["bounded"])[0]["packs"] == 5


@pytest.mark.multi
def test_training_in_parallel_is_bitwise_the_same_with_and_without_validation(
    make_config: Callable[..., RunConfig],
    held_out: tuple[SourceConfig, ...],
    read_tensors: Callable[[Path], dict[str, torch.Tensor]],
    tmp_path: Path,
) -> None:
    """Also where the parameters of a step are gathered in the next forward pass (overlap), and experts have biases."""
    deep, latent = smallest_config(vocab_size=264), smallest_deepseek_v3(vocab_size=264)
    deep = replace(deep, language=replace(deep.language, num_layers=4))
    layouts = {
        **{name: (deep, layout) for name, layout in DENSE.items()},
        "latent": (latent, ParallelConfig(ep_size=2)),
    }

    def config(name: str, validation: ValidationConfig | None) -> RunConfig:
        model, parallel = layouts[name]
        return make_config(
            f"{name}-{validation is not None}",
            steps=3,
            model=ModelSection(vision=model.vision, language=model.language),
            parallel=parallel,
            global_batch_size=4,
            validation=validation,
            checkpoints=CheckpointConfig(every_steps=3),
        )

    watching = ValidationConfig(sources=held_out, every_steps=1)
    pairs = [(config(name, None), config(name, watching)) for name in layouts]
    in_two([one for pair in pairs for one in pair], tmp_path)
    for plain, watched in pairs:
        one, other = (read_tensors(run.out / "checkpoints" / "step-00000003") for run in (plain, watched))
        assert one.keys() == other.keys()
        differing = [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]
        assert not differing, (plain.out, differing)
        assert len(validations(watched)) == 3


if __name__ == "__main__":
    for given in pickle.loads(Path(sys.argv[1]).read_bytes()):
        run_training(given)
    os._exit(0)  # warm process groups of gloo need no farewell
