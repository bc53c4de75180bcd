# SPDX-License-Identifier: Apache-2.0
"""The training loop: steps, validations, metrics and checkpoints, until the schedule ends or a stop is requested."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from mindvl_model.megatron.adapters import set_dropout_step
from mindvl_train.checkpoints.directory import checkpoint_name, newest_first
from mindvl_train.checkpoints.saving import Saver
from mindvl_train.faults.anomalous_steps import AnomalousSteps
from mindvl_train.faults.stragglers import Stragglers
from mindvl_train.metrics.metrics import Metrics
from mindvl_train.parallel_state import ParallelState, any_rank
from mindvl_train.rates import learning_rate
from mindvl_train.resolved_run import ResolvedRun
from mindvl_train.state import TrainState
from mindvl_train.step import train_step
from mindvl_train.validation.progress import is_due, is_patience_over
from mindvl_train.validation.validator import Validator

logger = logging.getLogger(__name__)

_Outcome = Literal["not due", "stopped", "done", "best"]  # of a validation; best: a checkpoint of this step is kept


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
    validator: Validator | None = None,
) -> Path:
    """Run steps from state.step to the end of the schedule, or of the patience; returns the last checkpoint.

    Args:
        saver: If an asynchronous save failed, the run stops, and the next save raises its error.
        begin: Called at the start of each part of a step with the name of the part and the step, counted from 1.
        on_step: Called after each step with the number of finished steps and the mean loss if it was just reported.
        should_stop: Called in each step before the update, in each validation and after each save; if true on a rank,
            the loop ends with a checkpoint of that step. The loop ends in the same way if the data is used up before
            the schedule ends.
        validator: Validates steps that are due; a resumed run first validates its step if it was stopped before.
    """
    config = run.config
    steps = config.schedule.steps
    saved: Path | None = None
    anomalous_steps = AnomalousSteps(config.faults, config.out, state, ranks)
    stragglers = Stragglers(every_steps=config.metrics.every_steps, device=ranks.device)

    def stop_requested() -> bool:
        return should_stop() or saver.failed  # a signal may reach one process only

    def begin_part(part: str) -> None:
        begin(part, state.step + 1)
        stragglers.begin(part)
        metrics.begin(part, state.step + 1)

    def validate() -> _Outcome:
        return _validate(validator, run, state, metrics, begin=begin, should_stop=stop_requested)

    outcome = validate()  # only if this run was stopped before the validation of its step, or had none before
    if outcome == "best" or (outcome == "done" and has_reached_end(run, state)):
        saved = _save(state, saver, metrics, begin)
    stop = outcome == "stopped"
    used_up = state.step < steps and state.source.is_used_up()
    while not (stop or used_up or state.step >= steps or has_reached_end(run, state)):
        set_dropout_step(state.models, state.step)
        report = train_step(
            state.models,
            state.optimizer,
            state.source,
            num_microbatches=run.num_microbatches,
            learning_rate=learning_rate(config.schedule, state.step),
            ranks=ranks,
            may_update=anomalous_steps.accepts,
            should_stop=stop_requested,
            begin=begin_part,
        )
        begin_part("report")
        state.step, state.repeated = state.step + 1, state.repeated + report.was_repeated
        used_up = state.step < steps and state.source.is_used_up()
        # A step that a stop leaves without validation is validated when the run resumes.
        outcome = "stopped" if report.stop else validate()
        stop = outcome == "stopped"
        ends = stop or used_up or state.step == steps or has_reached_end(run, state)
        save_now = ends or outcome == "best" or state.step % config.checkpoints.every_steps == 0
        # Counters in a checkpoint are those of its step, so metrics are always reported before a save.
        loss = metrics.add(state, report, report_now=save_now)
        stragglers.finish_step(state.step)
        on_step(state.step, loss)
        if save_now:
            saved = _save(state, saver, metrics, begin)
            # A request that came during the save stops the run now, without another step and a second save.
            stop = stop or any_rank(should_stop(), ranks.device)
    if ranks.is_first:
        _log_end(run, state, used_up=used_up)
    if saved is None:  # no step was left to train
        begin("checkpoint", state.step)
        saved = _last_checkpoint(config.out, state, saver)
    return saved


def has_reached_end(run: ResolvedRun, state: TrainState) -> bool:
    """Whether the run is finished: at the end of its schedule, with its last validation, or of its patience."""
    config, steps = run.config.validation, run.config.schedule.steps
    if config is None:
        return state.step >= steps
    if is_patience_over(config.patience, state.validation):
        return True
    return state.step >= steps and not is_due(state.step, steps, config.every_steps, state.validation)


def _save(state: TrainState, saver: Saver, metrics: Metrics, begin: Callable[[str, int], None]) -> Path:
    begin("checkpoint", state.step)
    path = saver.save(state)
    metrics.add_save(saver.stall_s)
    return path


def _validate(
    validator: Validator | None,
    run: ResolvedRun,
    state: TrainState,
    metrics: Metrics,
    *,
    begin: Callable[[str, int], None],
    should_stop: Callable[[], bool],
) -> _Outcome:
    """Validate the step if it is due, and report the result."""
    if validator is None:
        return "not due"
    metrics.stop_clock()
    before = state.validation.of_data(validator.data)
    if not is_due(state.step, run.config.schedule.steps, validator.config.every_steps, before):
        return "not due"
    if before != state.validation and state.validation.step:
        logger.warning(
            "validation: its samples or validation.measure have changed since step %d; the best checkpoint and the "
            "patience start again",
            state.validation.step,
        )
    began = time.monotonic()
    calls: dict[str, Any] = {"should_stop": should_stop, "begin": lambda: begin("validation", state.step)}
    result = validator.validate(state.step, **calls)
    generations = None if result is None or validator.generator is None else validator.generator.generate(**calls)
    report: dict[str, Any] | None = None
    # A stop in one of the two leaves the step without validation; the resumed run does both again.
    if result is not None and (generations is not None or validator.generator is None):
        state.validation = before.after(state.step, result.measure(validator.config.measure), validator.config)
        report = vars(result) | {"is_best": state.validation.best_step == state.step}
        report |= {} if generations is None else {"generations": generations}
    metrics.add_validation(report, time.monotonic() - began)
    if report is None:
        return "stopped"
    return "best" if report["is_best"] and run.config.checkpoints.keep_best else "done"


def _last_checkpoint(out: Path, state: TrainState, saver: Saver) -> Path:
    """The checkpoint that was resumed; a copy is saved if it is in the directory of another run."""
    final = out / "checkpoints" / checkpoint_name(state.step)
    return final if final in newest_first(final.parent) else saver.save(state)


def _log_end(run: ResolvedRun, state: TrainState, *, used_up: bool) -> None:
    """Log why a run ends before the end of its schedule, unless it was stopped."""
    config, steps = run.config.validation, run.config.schedule.steps
    if used_up:
        logger.warning("%s", _used_up_message(state.step, steps))
    elif config is not None and state.step < steps and is_patience_over(config.patience, state.validation):
        logger.info(
            "validation.patience: the loss was not lower in %d validation(s) in succession; the run is finished at step %d of "
            "%d. The best step is %s",
            state.validation.waited,
            state.step,
            steps,
            state.validation.best_step,
        )


def _used_up_message(step: int, steps: int) -> str:
    return (
        f"data: every source has reached its max_epochs after step {step} of {steps}; a checkpoint is saved. "
        "Raise or remove data.sources.*.max_epochs or add sources, and start again with --accept-data-change; "
        f"or set schedule.steps={step}."
    )
