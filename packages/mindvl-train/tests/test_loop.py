# SPDX-License-Identifier: Apache-2.0
"""When the loop saves, reports and ends; steps themselves are replaced by counting ones."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindvl_model import set_up_device
from mindvl_model.testing.tiny import smallest_config
from mindvl_train import CheckpointConfig, MetricsConfig, RunConfig
from mindvl_train.parallel_state import process_groups
from mindvl_train.resolved_run import resolve_run
from mindvl_train.state import TrainState


@pytest.fixture
def run_loop(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    from mindvl_train import loop
    from mindvl_train.checkpoints.saving import Saver
    from mindvl_train.metrics.metrics import Metrics
    from mindvl_train.metrics.run_card import run_facts
    from mindvl_train.step import StepReport

    def run(config: RunConfig, *, start: int = 0, stop_after: int | None = None) -> dict[str, Any]:
        seen: dict[str, Any] = {"rates": [], "packs": [], "saved": [], "reported": [], "parts": []}

        def count(
            *_: Any, num_microbatches: int, learning_rate: float, should_stop: Callable[[], bool], **__: Any
        ) -> StepReport:
            seen["rates"].append(learning_rate)
            seen["packs"].append(num_microbatches)
            return StepReport(torch.tensor(3.0), 3, 1.0, learning_rate, 8, stop=should_stop())

        class CountingSaver(Saver):
            def save(self, state: TrainState) -> Path:
                seen["saved"].append((state.step, state.tokens))
                return config.out / "checkpoints" / str(state.step)

        monkeypatch.setattr(loop, "train_step", count)
        source: Any = SimpleNamespace(is_used_up=lambda: False)
        state = TrainState(models=[torch.nn.Identity()], optimizer=None, source=source, step=start)
        with process_groups(set_up_device(), seed=0) as ranks:
            seen["last"] = loop.train(
                resolve_run(config, 1),
                state,
                Metrics([], config.metrics.every_steps, ranks, run_facts(config, smallest_config(), ranks.device)),
                ranks,
                CountingSaver(config.out / "checkpoints", config.checkpoints, {}),
                begin=lambda part, step: seen["parts"].append((step, part)),
                on_step=lambda step, loss: seen["reported"].append((step, loss)),
                should_stop=lambda: stop_after is not None and state.step + 1 >= stop_after,
            )
        return seen

    return run


def test_it_saves_on_schedule_and_at_the_end_with_counters_of_that_step(
    make_config: Callable[..., RunConfig], run_loop: Callable[..., dict[str, Any]]
) -> None:
    config = make_config(
        steps=5,
        checkpoints=CheckpointConfig(every_steps=2),
        metrics=MetricsConfig(every_steps=3, tensorboard=False),
    )
    seen = run_loop(config)
    assert seen["saved"] == [(2, 16), (4, 32), (5, 40)]
    assert seen["reported"] == [(1, None), (2, 1.0), (3, 1.0), (4, 1.0), (5, 1.0)]
    assert seen["packs"] == [2] * 5
    assert seen["parts"][:3] == [(1, "report"), (2, "report"), (2, "checkpoint")]
    assert seen["last"] == config.out / "checkpoints" / "5"


def test_it_stops_when_asked_and_takes_up_the_schedule_where_it_was(
    make_config: Callable[..., RunConfig], run_loop: Callable[..., dict[str, Any]]
) -> None:
    config = make_config(steps=6)
    straight = run_loop(config)["rates"]
    stopped = run_loop(config, stop_after=2)
    assert [step for step, _ in stopped["saved"]] == [2]
    assert stopped["rates"] + run_loop(config, start=2)["rates"] == straight
