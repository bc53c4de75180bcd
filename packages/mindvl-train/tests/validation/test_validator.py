# SPDX-License-Identifier: Apache-2.0
"""Validation inside real runs: its losses in every layout, and a training that does not notice it.

As a program this file is one of the processes.
"""

import json
import os
import pickle
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mindvl_data import SourceConfig
from mindvl_model import set_up_device
from mindvl_model.adapters import LoRAConfig
from mindvl_model.parallel_config import ParallelConfig
from mindvl_model.testing.ranks import run_ranks
from mindvl_model.testing.tiny import smallest_config, smallest_deepseek_v3, smallest_qwen3_moe
from mindvl_train import CheckpointConfig, ModelSection, OptimizerConfig, RunConfig, run_training
from mindvl_train.validation.config import ValidationConfig

pytestmark = pytest.mark.slow

Make = Callable[..., RunConfig]
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


def test_training_is_bitwise_the_same_with_and_without_validation(
    make_config: Make,
    held_out: tuple[SourceConfig, ...],
    read_tensors: Callable[[Path], dict[str, torch.Tensor]],
    read_losses: Callable[[RunConfig], list[tuple[int, float, float]]],
) -> None:
    plain = make_config("plain")
    watched = make_config("watched", validation=ValidationConfig(sources=held_out, every_steps=2))
    ends = [run_training(config) for config in (plain, watched)]
    assert read_losses(plain) == read_losses(watched)
    one, other = (read_tensors(end.checkpoint) for end in ends)
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    ledgers = [json.loads((end.checkpoint / "ledger.json").read_text()) for end in ends]
    assert ledgers[0] == ledgers[1]
    assert [line["step"] for line in validations(watched)] == [2, 4, 6]


def test_the_loss_is_that_of_every_sample_once(make_config: Make, held_out: tuple[SourceConfig, ...]) -> None:
    """Compared with the model on every sample alone, in the order of the shards, with the weights that were saved."""
    config = make_config(steps=2, validation=ValidationConfig(sources=held_out, every_steps=2))
    result = run_training(config)
    (found,) = validations(config)
    assert (found["samples"], found["failed_samples"], found["dropped_samples"]) == (16, 0, 0)
    expected = _alone(config, result.checkpoint, held_out)
    assert found["loss_tokens"] == sum(count for _, count, _ in expected.values())
    for name, (loss, count, correct) in expected.items():
        assert found["loss_by_source"][name] == pytest.approx(loss / count, rel=1e-5)
        assert found["token_accuracy_by_source"][name] == pytest.approx(correct / count)
    assert found["loss"] == pytest.approx(sum(one[0] for one in expected.values()) / found["loss_tokens"], rel=1e-5)


def _alone(config: RunConfig, checkpoint: Path, sources: tuple[SourceConfig, ...]) -> dict[str, tuple[float, int, int]]:
    """Loss, loss tokens and correct tokens by source, from the logits of one sample after the other."""
    from mindvl_data import SourceIndex, load_tokenizer
    from mindvl_data.order.data_order import OrderedSample
    from mindvl_data.pack_builder import PackBuilder
    from mindvl_data.shards.files import ShardFiles
    from mindvl_train.checkpoints.restore import load_weights
    from mindvl_train.parallel_state import process_groups
    from mindvl_train.resolved_run import resolve_run, with_tokenizer
    from mindvl_train.validation.validator import validation_data
    from mindvl_train.weights import build_models

    run = with_tokenizer(resolve_run(config, 1))
    assert config.validation is not None
    data = validation_data(config.data, config.validation)
    tokenizer, files = load_tokenizer(data.tokenizer), ShardFiles(data.store)
    indexes = [SourceIndex(source, data, tokenizer, files) for source in data.sources]
    builder = PackBuilder(data, indexes, tokenizer=tokenizer, files=files, position_kind=run.model.position_kind)
    found: dict[str, tuple[float, int, int]] = {}
    with process_groups(set_up_device(), seed=0) as ranks, torch.no_grad():
        (model,) = build_models(run, ranks.device, load_init=False)
        load_weights(checkpoint, model)
        model.eval()
        for number, index in enumerate(indexes):
            loss, count, correct = 0.0, 0, 0
            for shard, size in enumerate(index.index.shards.sizes):
                tokens, patches = index.lengths(shard)
                for row in range(size):
                    sample = OrderedSample(number, 0, shard, row, int(tokens[row]), int(patches[row]))
                    inputs = builder.build(1, (sample,)).batch.model_inputs()
                    labels = inputs.pop("labels")
                    inputs.pop("loss_positions")
                    logits = model.logits(**inputs)
                    loss += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
                    count += int((labels != -100).sum())
                    correct += int((logits.argmax(dim=-1) == labels).sum())
            found[index.name] = (loss, count, correct)
    return found


def test_a_bound_takes_the_same_first_packs_each_time(make_config: Make, held_out: tuple[SourceConfig, ...]) -> None:
    bounded = ValidationConfig(sources=held_out, every_steps=1, max_packs=1)
    still = make_config("bounded", steps=2, validation=bounded)
    still = make_config("bounded", steps=2, validation=bounded, schedule=_no_learning(still))
    run_training(still)
    first, second = validations(still)
    assert first["packs"] == second["packs"] == 1
    assert 0 < first["samples"] < 16
    assert {name: first[name] for name in first.keys() - {"step", "seconds", "is_best"}} == {
        name: second[name] for name in second.keys() - {"step", "seconds", "is_best"}
    }


def _no_learning(config: RunConfig) -> Any:
    return replace(config.schedule, peak_lr=0.0, min_lr=0.0)


def test_the_best_checkpoint_is_kept_and_linked(make_config: Make, held_out: tuple[SourceConfig, ...]) -> None:
    config = make_config(
        steps=8,
        validation=ValidationConfig(sources=held_out, every_steps=1),
        checkpoints=CheckpointConfig(every_steps=100, keep_last=1),
    )
    result = run_training(config)
    losses = {line["step"]: line["loss"] for line in validations(config)}
    best = min(losses, key=lambda step: losses[step])
    link = config.out / "checkpoints" / "best"
    assert link.resolve().name == f"step-{best:08d}"
    assert json.loads((link / "manifest.json").read_text())["validation"]["best_step"] == best
    names = {path.name for path in (config.out / "checkpoints").iterdir()}
    assert names == {"best", f"step-{best:08d}", result.checkpoint.name}


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


def test_adapters_with_dropout_train_bitwise_the_same_with_and_without_validation(
    make_config: Make,
    held_out: tuple[SourceConfig, ...],
    read_tensors: Callable[[Path], dict[str, torch.Tensor]],
) -> None:
    adapter = LoRAConfig(rank=2, dropout=0.5)
    plain = make_config("plain", adapter=adapter)
    watched = make_config("watched", adapter=adapter, validation=ValidationConfig(sources=held_out, every_steps=1))
    one, other = (read_tensors(run_training(config).checkpoint) for config in (plain, watched))
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.multi
def test_a_run_that_resumes_on_more_ranks_keeps_its_best_step_and_patience(
    make_config: Make, held_out: tuple[SourceConfig, ...], tmp_path: Path
) -> None:
    def config(out: str, parallel: ParallelConfig) -> RunConfig:
        return make_config(
            out,
            steps=6,
            parallel=parallel,
            global_batch_size=4,
            validation=ValidationConfig(sources=held_out, every_steps=1, patience=9, min_delta=100.0),
            optimizer=OptimizerConfig(epsilon=1e-4),  # damped, so that rounding does not grow
        )

    def stop(step: int, loss: float | None) -> None:
        if step == 2:  # handled in the next step
            os.kill(os.getpid(), signal.SIGTERM)

    straight = config("straight", ParallelConfig())
    expected = json.loads((run_training(straight).checkpoint / "manifest.json").read_text())["validation"]
    many = [config("tp2", ParallelConfig(tp_size=2)), config("dp2", ParallelConfig())]
    for one in many:
        assert not run_training(replace(one, parallel=ParallelConfig()), on_step=stop).finished
    in_two(many, tmp_path)
    for one in many:
        for found, line in zip(validations(one), validations(straight), strict=True):
            assert found["loss"] == pytest.approx(line["loss"], rel=1e-4)
            assert found["samples"] == line["samples"]
        found = json.loads((one.out / "checkpoints" / "step-00000006" / "manifest.json").read_text())["validation"]
        assert {name: found[name] for name in ("step", "best_step", "waited", "data")} == {
            name: expected[name] for name in ("step", "best_step", "waited", "data")
        }


if __name__ == "__main__":
    for given in pickle.loads(Path(sys.argv[1]).read_bytes()):
        run_training(given)
    os._exit(0)  # warm process groups of gloo need no farewell
