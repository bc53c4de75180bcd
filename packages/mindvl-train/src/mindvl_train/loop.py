# SPDX-License-Identifier: Apache-2.0
"""The training loop: steps, metrics and checkpoints, until the schedule ends or a stop is requested."""

import logging
from collections.abc import Callable
from pathlib import Path

from mindvl_train.checkpoints.directory import newest_first
from mindvl_train.checkpoints.saving import Saver
from mindvl_train.faults.anomalous_steps import AnomalousSteps
from mindvl_train.faults.stragglers import Stragglers
from mindvl_train.metrics.metrics import Metrics
from mindvl_train.parallel_state import ParallelState, any_rank
from mindvl_train.resolved_run import ResolvedRun
from mindvl_train.schedule import learning_rate
from mindvl_train.state import TrainState
from mindvl_train.step import train_step

logger = logging.getLogger(__name__)


def train(
    run: ResolvedRun,
    state: TrainState,
    metrics: Metrics,
    ranks: ParallelState,
    saver: Saver,
    *,
    begin: Callable[[str, int], None],
    on_step: Callable[[int, float | None], None],
    should_stop: Callable[[], bool],
) -> Path:
    """Run steps from state.step to the end of the schedule; returns the last checkpoint.

    Args:
        saver: If an asynchronous save failed, the run stops, and the next save raises its error.
        begin: Called at the start of each part of a step with the name of the part and the step, counted from 1.
        on_step: Called after each step with the number of finished steps and the mean loss if it was just reported.
        should_stop: Called in each step before the update, and after each save; if true on a rank, the loop ends with a
            checkpoint of that step. The loop ends in the same way if the data is used up before the schedule ends.
    """
    config = run.config
    steps = config.schedule.steps
    saved: Path | None = None
    anomalous_steps = AnomalousSteps(config.faults, config.out, state, ranks)
    stragglers = Stragglers(every_steps=config.metrics.every_steps, device=ranks.device)

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
            num_microbatches=run.num_microbatches,
            learning_rate=learning_rate(config.schedule, state.step),
            ranks=ranks,
            may_update=anomalous_steps.accepts,
            should_stop=lambda: should_stop() or saver.failed,  # a signal may reach one process only
            begin=begin_part,
        )
        begin_part("report")
        state.step += 1
        stop = report.stop
        used_up = state.step < steps and state.source.is_used_up()
        save_now = stop or used_up or state.step == steps or state.step % config.checkpoints.every_steps == 0
        # Counters in a checkpoint are those of its step, so metrics are always reported before a save.
        loss = metrics.add(state, report, report_now=save_now)
        stragglers.finish_step(state.step)
        on_step(state.step, loss)
        if save_now:
            begin("checkpoint", state.step)
            saved = saver.save(state)
            metrics.add_save(saver.stall_s)
            # A request that came during the save stops the run now, without another step and a second save.
            stop = stop or any_rank(should_stop(), ranks.device)
        if stop:
            break
    if used_up and ranks.is_first:
        logger.warning("%s", _used_up_message(state.step, steps))
    if saved is None:  # no step was left to train
        begin("checkpoint", state.step)
        saved = _last_checkpoint(config.out, state, saver)
    return saved


def _last_checkpoint(out: Path, state: TrainState, saver: Saver) -> Path:
    """The checkpoint that was resumed; a copy is saved if it is in the directory of another run."""
    final = out / "checkpoints" / f"step-{state.step:08d}"
    return final if final in newest_first(final.parent) else saver.save(state)


def _used_up_message(step: int, steps: int) -> str:
    return (
        f"data: every source has reached its max_epochs after step {step} of {steps}; a checkpoint is saved. "
        "Raise or remove data.sources.*.max_epochs or add sources, and start again with --accept-data-change; "
        f"or set schedule.steps={step}."
    )
