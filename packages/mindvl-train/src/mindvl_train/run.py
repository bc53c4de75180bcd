# SPDX-License-Identifier: Apache-2.0
"""RunConfig -> every object of a training run, in order; the only module that knows them all.

Read this first: device, process groups, tokenizer, model, weights, gradient buffers, optimizer, data, checkpoint, loop.
"""

import gc
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mindvl_data import Loader
from mindvl_model import set_up_device
from mindvl_ops import check_operators, select_backends, table_text
from mindvl_ops.runtime.start import device_kind, prepare_process
from mindvl_train.claim import claimed
from mindvl_train.config import RunConfig
from mindvl_train.errors import TrainError
from mindvl_train.faults.lost_rank import lost_ranks_named
from mindvl_train.faults.watchdog import Watchdog
from mindvl_train.launch import local_rank_and_size, world_size
from mindvl_train.loading import open_validator, training_loader
from mindvl_train.rates import rate_factor
from mindvl_train.reading import start_timeout
from mindvl_train.resolved_run import ResolvedRun, resolve_run, with_tokenizer
from mindvl_train.signals import stop_requests

if TYPE_CHECKING:
    from mindvl_train.metrics.metrics import Metrics
    from mindvl_train.parallel_state import ParallelState
    from mindvl_train.state import TrainState

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunResult:
    """State of a run at its end."""

    out: Path
    step: int
    checkpoint: Path
    best_checkpoint: Path | None  # with the lowest validation loss; None: no validation, or it is not kept
    finished: bool  # False if it was stopped early
    asked_to_stop: bool  # also true if the request came too late to stop the run early: no other run should follow
    ended_early: bool  # finished before the end of the schedule, because the validation loss was not lower
    data_used_up: bool  # every source has reached its max_epochs, so the run cannot continue without more data
    data: dict[str, Any]  # report of the loader: packing efficiency, visual tokens, samples by source, failed samples


def run_training(
    config: RunConfig,
    *,
    resume: Literal["auto", "never"] | Path = "auto",
    accept_data_change: str | None = None,
    on_step: Callable[[int, float | None], None] = lambda step, loss: None,
) -> RunResult:
    """Train one phase, from its initial weights or from a checkpoint, to its last step.

    Args:
        resume: "auto" resumes from the newest checkpoint in config.out, "never" refuses a directory that has one,
            a path names the checkpoint.
        accept_data_change: User who accepts that sources were changed, added or removed since the checkpoint, such as
            user@host; None: such a checkpoint is refused.
        on_step: Called after each step with the number of finished steps and the mean loss if it was just reported.

    Raises:
        TrainError: The run cannot start or continue.
    """
    run = resolve_run(config, world_size())
    gc.collect()  # reference cycles keep the model, groups and threads of an earlier phase in this process alive
    local_rank, local_size = local_rank_and_size()
    prepared = prepare_process(  # before the import of torch_npu, which reads the variables
        os.environ,
        device_kind(),
        local_rank=local_rank,
        num_local_ranks=local_size,
        binding=config.ops.runtime.bind_cores,
        memory_tight=config.ops.runtime.memory_tight,
    )
    accelerator = set_up_device()
    # Imported here: these modules import megatron-core, which needs the device setup first.
    from mindvl_train.checkpoints.restore import resume_first
    from mindvl_train.checkpoints.saving import Saver
    from mindvl_train.loop import train
    from mindvl_train.megatron.optimizer import release
    from mindvl_train.parallel_state import any_rank, process_groups

    select_backends(config.ops, accelerator.kind)
    with (
        stop_requests() as stop_requested,
        process_groups(
            accelerator, config.seed, run.parallel, timeout=start_timeout(run, ranks_per_machine=local_size)
        ) as ranks,
        lost_ranks_named(config.out, rank=ranks.rank),
        _claimed(config.out, ranks),
        Watchdog(
            config.out,
            rank=ranks.rank,
            num_ranks=ranks.num_ranks,
            limit_s=config.faults.stuck_after_s,
            is_first_of_machine=local_rank == 0,
        ) as watchdog,
    ):
        found = _checkpoints_to_resume(config, resume, is_first=ranks.is_first)
        run = with_tokenizer(run)
        described = _described(run)
        state, source = _build_state(
            run, ranks, load_init=not found or config.adapter is not None, cores=prepared.cores
        )
        try:
            if found:
                resumed = resume_first(found, state, described, accept_data_change=accept_data_change)
                logger.info("resumed at step %d from %s", state.step, resumed)
                _correct_best(config, ranks, state)
            if ranks.is_first:
                logger.info("precision: %s%s", config.precision, config.precision_reason)
                logger.info("operators:\n%s", table_text(check_operators(device=ranks.device)))
            with (
                closing(_metrics(run, ranks, state)) as metrics,
                Saver(config.out / "checkpoints", config.checkpoints, described) as saver,
                open_validator(run, ranks, state, prepared.cores) as validator,
            ):
                calls: dict[str, Any] = {"begin": watchdog.begin, "on_step": on_step, "should_stop": stop_requested}
                last = train(run, state, metrics, ranks, saver, validator=validator, **calls)
            return _result(run, state, source, last, any_rank(stop_requested(), ranks.device))
        finally:
            source.close()
            release(state.models)


def _described(run: ResolvedRun) -> dict[str, Any]:
    """What the manifest of every checkpoint says of the run."""
    from mindvl_train.adapters import describe_base
    from mindvl_train.checkpoints.directory import plain_json

    parents = [str(path) for path in vars(run.config.init).values() if path is not None]
    base = describe_base(run.config)
    return {"model": plain_json(run.model), "run": plain_json(run.config), "base": base, "parents": parents}


@contextmanager
def _claimed(out: Path, ranks: "ParallelState") -> Iterator[None]:
    """Rank 0 locks the output directory; if it cannot, all ranks raise."""
    from mindvl_train.parallel_state import first_message

    with ExitStack() as stack:
        problem: str | None = None
        if ranks.is_first:
            try:
                stack.enter_context(claimed(out))
            except TrainError as error:
                problem = str(error)
        problem = first_message(problem)
        if problem is not None:
            raise TrainError(problem)
        yield


def _best_of(config: RunConfig) -> Path | None:
    from mindvl_train.checkpoints.best import BEST

    link = config.out / "checkpoints" / BEST
    return link.parent / os.readlink(link) if config.validation is not None and link.is_symlink() else None


def _correct_best(config: RunConfig, ranks: "ParallelState", state: "TrainState") -> None:
    """Make the link to the best checkpoint match the resumed state: a kill may have come before the link was changed."""
    from mindvl_train.checkpoints.best import link_best
    from mindvl_train.checkpoints.directory import checkpoint_name

    if ranks.is_first and config.validation is not None and config.checkpoints.keep_best:
        best = state.validation.best_step
        link_best(config.out / "checkpoints", None if best is None else checkpoint_name(best))


def _result(run: ResolvedRun, state: "TrainState", source: Loader, last: Path, stopped: bool) -> RunResult:
    from mindvl_train.loop import has_reached_end

    finished, is_before_end = has_reached_end(run, state), state.step < run.config.schedule.steps
    return RunResult(
        run.config.out,
        state.step,
        last,
        _best_of(run.config),
        finished,
        stopped,
        ended_early=finished and is_before_end,
        data_used_up=not finished and is_before_end and source.is_used_up(),
        data=source.report(),
    )


def _build_state(
    run: ResolvedRun, ranks: "ParallelState", *, load_init: bool, cores: frozenset[int]
) -> "tuple[TrainState, Loader]":
    """Model, optimizer and data at the start of the run; the loader also by itself, with its own type."""
    from mindvl_train.megatron.optimizer import build_optimizer, wrap_models
    from mindvl_train.megatron.pipeline import prepare_schedule
    from mindvl_train.state import TrainState
    from mindvl_train.weights import build_models

    models = wrap_models(
        build_models(run, ranks.device, load_init=load_init),
        # Without another rank that has the same weights there is no communication to overlap.
        overlap=run.parallel.overlap and ranks.dp_size * ranks.cp_size > 1,
    )
    schedule = run.config.schedule
    optimizer = build_optimizer(
        models, run.config.optimizer, rate_factor=lambda param_name: rate_factor(param_name, schedule, run.model)
    )
    prepare_schedule(models, optimizer)
    source = training_loader(run, ranks, cores)
    return TrainState(models=models, optimizer=optimizer, source=source), source


def _metrics(run: ResolvedRun, ranks: "ParallelState", state: "TrainState") -> "Metrics":
    """Metrics of every rank; only rank 0 opens sinks and writes the run card."""
    from mindvl_train.metrics.metrics import Metrics
    from mindvl_train.metrics.run_card import run_facts, write_card
    from mindvl_train.metrics.sinks import open_sinks

    sinks = []
    if ranks.is_first:
        sinks = open_sinks(run.config, state.step, state.validation.step)
        write_card(run.config, run.model, ranks, start_step=state.step)
    facts = run_facts(run.config, run.model, ranks.device)
    return Metrics(sinks, run.config.metrics.every_steps, ranks, facts, state.models)


def _checkpoints_to_resume(config: RunConfig, resume: Literal["auto", "never"] | Path, *, is_first: bool) -> list[Path]:
    """The named checkpoint, or all of this run, newest first: older ones are used if newer ones are damaged."""
    from mindvl_train.checkpoints.directory import newest_checkpoint, newest_first, restore_replaced

    if isinstance(resume, Path):
        found = [newest_checkpoint(resume)]
    else:
        if is_first:
            restore_replaced(config.out / "checkpoints")
        found = newest_first(config.out / "checkpoints")
        if found and resume == "never":
            raise TrainError(f"{config.out}: already has checkpoint {found[0].name}. Set another `out`, or resume it.")
    config.out.mkdir(parents=True, exist_ok=True)
    return found
