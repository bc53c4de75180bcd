# SPDX-License-Identifier: Apache-2.0
"""Validation inside real runs: its losses, and a training that does not notice it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mindvl_data import SourceConfig
from mindvl_model import set_up_device
from mindvl_train import CheckpointConfig, RunConfig, run_training
from mindvl_train.validation.config import ValidationConfig

pytestmark = pytest.mark.slow

Make = Callable[..., RunConfig]


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
    from dataclasses import replace

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
