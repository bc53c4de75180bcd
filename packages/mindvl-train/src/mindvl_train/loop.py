# SPDX-License-Identifier: Apache-2.0
"""The training loop: steps, numbers, checkpoints, until the schedule ends or somebody asks to stop."""

import logging
from collections.abc import Callable
from pathlib import Path

from mindvl_train.checkpoints.directory import newest_first
from mindvl_train.checkpoints.saving import Saver
from mindvl_train.config import RunConfig
from mindvl_train.faults.anomalous_steps import AnomalousSteps
from mindvl_train.faults.stragglers import Stragglers
from mindvl_train.metrics.metrics import Metrics
from mindvl_train.parallel import Place, any_process
from mindvl_train.schedule import learning_rate
from mindvl_train.state import TrainState
from mindvl_train.step import train_step

logger = logging.getLogger(__name__)


def train(
    config: RunConfig,
    state: TrainState,
    metrics: Metrics,
    place: Place,
    saver: Saver,
    *,
    begin: Callable[[str, int], None],
    on_step: Callable[[int, float | None], None],
    should_stop: Callable[[], bool],
) -> Path:
    """Run steps from state.step to the end of the schedule; returns the last checkpoint.

    Args:
        saver: When a checkpoint in the background failed, the run is stopped, and its next save says why.
        begin: Told which part of which step begins.
        on_step: Told the number of finished steps after each one, and the mean loss when it was just reported.
        should_stop: Asked after each step and after each save; when it says yes, the loop ends with a checkpoint of
            that step. The loop ends in the same way where the data is used up before the schedule.
    """
    steps = config.schedule.steps
    saved: Path | None = None
    anomalous_steps = AnomalousSteps(config.faults, config.out, state, place)
    stragglers = Stragglers(every_steps=config.metrics.every_steps, device=place.device)

    def begin_part(part: str) -> None:
        begin(part, state.step + 1)
        stragglers.begin(part)
        metrics.begin(part, state.step + 1)

    used_up = state.step < steps and state.source.is_used_up()
    while state.step < steps and not used_up:
        report = train_step(
            state.models,
            state.optimizer,
            state.source,
            num_microbatches=config.global_batch_size // place.dp_size,
            learning_rate=learning_rate(config.schedule, state.step),
            place=place,
            may_update=anomalous_steps.accepts,
            begin=begin_part,
        )
        begin_part("report")
        state.step += 1
        stop = any_process(should_stop() or saver.failed, place.device)  # a signal may reach one process only
        used_up = state.step < steps and state.source.is_used_up()
        save_now = stop or used_up or state.step == steps or state.step % config.checkpoints.every_steps == 0
        # Counters in a checkpoint are those of its step, so a report always comes before a save.
        loss = metrics.add(state, report, report_now=save_now)
        stragglers.finish_step(state.step)
        on_step(state.step, loss)
        if save_now:
            begin("checkpoint", state.step)
            saved = saver.save(state)
            metrics.add_save(saver.stall_s)
            # What came while the files were written does not have to wait for one more step and a second save.
            stop = stop or any_process(should_stop(), place.device)
        if stop:
            break
    if used_up and place.is_first:
        logger.warning("%s", _advice(state.step, steps))
    if saved is None:  # there was no step left to do
        begin("checkpoint", state.step)
        saved = _last_checkpoint(config.out, state, saver)
    return saved


def _last_checkpoint(out: Path, state: TrainState, saver: Saver) -> Path:
    """The one that was resumed; saved here where it lies in the directory of another run."""
    final = out / "checkpoints" / f"step-{state.step:08d}"
    return final if final in newest_first(final.parent) else saver.save(state)


def _advice(step: int, steps: int) -> str:
    return (
        f"data: every source has reached its max_epochs after step {step} of {steps}; a checkpoint is saved. "
        "Raise or remove data.sources.*.max_epochs or add sources, and start again with --accept-data-change; "
        f"or set schedule.steps={step}."
    )
