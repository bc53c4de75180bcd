# SPDX-License-Identifier: Apache-2.0
"""Stopping and resuming equals never stopping, bit for bit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mindvl_train import RunConfig, run_training
from mindvl_train.state import TrainState

pytestmark = pytest.mark.slow


class KilledError(Exception):
    """Stands for a crash between two checkpoints."""


def die_at(step: int) -> Callable[[int, float | None], None]:
    def on_step(done: int, loss: float | None) -> None:
        if done == step:
            raise KilledError

    return on_step


def counters_in(checkpoint: Path) -> dict[str, Any]:
    """What the manifest keeps of the counters."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    return {name: manifest[name] for name in ("step", "tokens", "loss_tokens", "skipped", "norms", "losses")}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_six_steps_straight_equal_three_a_crash_and_three_more(
    make_config: Callable[..., RunConfig],
    read_tensors: Callable[[Path], dict[str, torch.Tensor]],
    read_losses: Callable[[RunConfig], Any],
    precision: str,
) -> None:
    straight = run_training(make_config("straight", precision=precision))
    config = make_config("broken", precision=precision)
    with pytest.raises(KilledError):
        run_training(config, on_step=die_at(5))  # two steps after its checkpoint
    seen: list[int] = []
    resumed = run_training(config, on_step=lambda step, loss: seen.append(step))
    assert seen == [4, 5, 6]
    assert (resumed.step, resumed.finished) == (6, True)

    expected, actual = read_tensors(straight.checkpoint), read_tensors(resumed.checkpoint)
    assert expected.keys() == actual.keys()
    assert any("exp_avg_sq" in name for name in expected)
    for name, tensor in expected.items():
        assert torch.equal(tensor, actual[name]), name
    ledgers = [(result.checkpoint / "ledger.json").read_bytes() for result in (straight, resumed)]
    assert ledgers[0] == ledgers[1]
    counters = [counters_in(result.checkpoint) for result in (straight, resumed)]
    assert counters[0] == counters[1]
    assert counters[0]["loss_tokens"] > 0
    assert len(counters[0]["norms"]) == 6  # spikes are judged by those before the stop, too
    assert read_losses(make_config("straight")) == read_losses(config)
    assert [step for step, _, _ in read_losses(config)] == [1, 2, 3, 4, 5, 6]


def test_a_manifest_restores_every_counter() -> None:
    source: Any = None
    counted = dict(step=9, loss_tokens=8, tokens=7, skipped=6, consecutive_skips=5, repeated=4, placeholders=3)
    state = TrainState([], None, source, **counted, norms=[1.5], losses=[2.5])
    again = TrainState([], None, source)
    again.restore(json.loads(json.dumps(state.counters())))
    assert again == state
