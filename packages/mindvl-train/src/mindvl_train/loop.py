# SPDX-License-Identifier: Apache-2.0
"""The training loop: steps, numbers, checkpoints, until the schedule ends or somebody asks to stop."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mindvl_train import checkpoints
from mindvl_train.config import RunConfig
from mindvl_train.metrics import Metrics
from mindvl_train.parallel import Place, any_process
from mindvl_train.schedule import learning_rate
from mindvl_train.state import TrainState
from mindvl_train.step import train_step


def train(
    config: RunConfig,
    state: TrainState,
    metrics: Metrics,
    place: Place,
    described: dict[str, Any],
    *,
    on_step: Callable[[int, float | None], None],
    should_stop: Callable[[], bool],
) -> Path:
    """Run steps from state.step to the end of the schedule; returns the last checkpoint.

    Args:
        described: What manifests say of the run.
        on_step: Told the number of finished steps after each one, and the mean loss when it was just reported.
        should_stop: Asked after each step; when it says yes, a checkpoint is saved and the loop ends.
    """
    folder = config.out / "checkpoints"
    steps = config.schedule.steps
    saved: Path | None = None
    while state.step < steps:
        report = train_step(
            state.models,
            state.optimizer,
            state.source,
            num_microbatches=config.packs_per_step // place.dp_size,
            learning_rate=learning_rate(config.schedule, state.step),
            place=place,
        )
        state.step += 1
        stop = any_process(should_stop(), place.device)  # a signal may reach one process only
        save_now = stop or state.step == steps or state.step % config.checkpoints.every_steps == 0
        # Counters in a checkpoint are those of its step, so a report always comes before a save.
        loss = metrics.add(state, report, report_now=save_now)
        on_step(state.step, loss)
        saved = checkpoints.save(folder, state, described, config.checkpoints.keep_last) if save_now else None
        if stop:
            break
    return saved or checkpoints.newest(config.out)
