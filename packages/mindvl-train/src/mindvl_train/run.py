# SPDX-License-Identifier: Apache-2.0
"""RunConfig -> every object, in order: the only place that knows them all.

Read this first: device, groups, tokenizer, model, weights, gradient buffers, optimizer, data, checkpoint, loop.
"""

import gc
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mindvl_data import DataConfig, DataError, Loader, load_tokenizer
from mindvl_model import MindVLConfig, for_tokenizer, set_up_device
from mindvl_ops import check_operators, select_backends, table_text
from mindvl_ops.runtime.affinity import bind_thread
from mindvl_ops.runtime.start import device_kind, prepare_process
from mindvl_train.claim import claimed
from mindvl_train.config import RunConfig
from mindvl_train.errors import TrainError
from mindvl_train.faults.watchdog import Watchdog, outlasting
from mindvl_train.launch import local_place, world_size
from mindvl_train.layouts import data_parallel_size
from mindvl_train.signals import stop_requests

if TYPE_CHECKING:
    from mindvl_train.metrics.metrics import Metrics
    from mindvl_train.parallel import Place
    from mindvl_train.state import TrainState

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunResult:
    """Where a run ended."""

    out: Path
    step: int
    checkpoint: Path
    finished: bool  # False when it was asked to stop early
    asked_to_stop: bool  # also true where that came too late to stop it early: nothing should follow
    data_used_up: bool  # every source has reached its max_epochs, so it cannot go on without more data
    data: dict[str, Any]  # the loader's report: fill, visual tokens, samples by source, drops


def run_training(
    config: RunConfig,
    *,
    resume: Literal["auto", "never"] | Path = "auto",
    accept_data_change: str | None = None,
    on_step: Callable[[int, float | None], None] = lambda step, loss: None,
) -> RunResult:
    """Train one phase, from its weights or from where it stopped, to its last checkpoint.

    Args:
        resume: "auto" goes on from the newest checkpoint in config.out, "never" refuses a directory that has one,
            a path names the checkpoint.
        accept_data_change: Who accepts that sources changed, came or went since the checkpoint, such as user@host;
            None: such a checkpoint is refused.
        on_step: Told the number of finished steps after each one, and the mean loss when it was just reported.

    Raises:
        TrainError: The run cannot start or go on.
    """
    data_parallel_size(config, world_size())
    gc.collect()  # an earlier phase in this process leaves its model, its groups and their threads in cycles
    local_rank, num_local_ranks = local_place()
    prepared = prepare_process(  # before torch_npu is imported, which reads the variables
        os.environ,
        device_kind(),
        local_rank=local_rank,
        num_local_ranks=num_local_ranks,
        binding=config.ops.runtime.bind_cores,
        memory_tight=config.ops.runtime.memory_tight,
    )
    accelerator = set_up_device()
    # Imported here: these modules import megatron-core, which must find the device settled.
    from mindvl_train.checkpoints.directory import plain_json
    from mindvl_train.checkpoints.restore import resume_first
    from mindvl_train.checkpoints.saving import Saver
    from mindvl_train.loop import train
    from mindvl_train.megatron.optimizer import release
    from mindvl_train.parallel import any_process, process_groups

    select_backends(config.ops, accelerator.kind)
    with (
        stop_requests() as stop_asked,
        process_groups(
            accelerator, config.seed, config.parallel, patience=outlasting(config.faults.stuck_after_s)
        ) as place,
        _claimed(config.out, place),
        Watchdog(
            config.out,
            rank=place.rank,
            num_ranks=place.num_ranks,
            limit_s=config.faults.stuck_after_s,
            speaks_for_machine=local_rank == 0,
        ) as watchdog,
    ):
        found = _checkpoints_to_resume(config, resume)
        model_config = model_config_of(config)
        described = {
            "model": plain_json(model_config),
            "run": plain_json(config),
            "parents": [str(path) for path in vars(config.init).values() if path is not None],
        }
        state, source = _build_state(config, model_config, place, load_init=not found, cores=prepared.cores)
        try:
            if found:
                resumed = resume_first(found, state, described, accept_data_change=accept_data_change)
                logger.info("resumed at step %d from %s", state.step, resumed)
            if place.is_first:
                logger.info("operators:\n%s", table_text(check_operators(device=place.device)))
            with (
                closing(_metrics(config, model_config, place, state)) as metrics,
                Saver(config.out / "checkpoints", config.checkpoints, described) as saver,
            ):
                last = train(
                    config, state, metrics, place, saver, begin=watchdog.begin, on_step=on_step, should_stop=stop_asked
                )
            asked = any_process(stop_asked(), place.device)
            return _result(config, state, source, last, asked)
        finally:
            source.close()
            release(state.models)


@contextmanager
def _claimed(out: Path, place: "Place") -> Iterator[None]:
    """The directory of the run, claimed by the first process; when it cannot be, no process goes on."""
    from mindvl_train.parallel import said_by_any

    with ExitStack() as stack:
        refusal: str | None = None
        if place.is_first:
            try:
                stack.enter_context(claimed(out))
            except TrainError as error:
                refusal = str(error)
        said = said_by_any(refusal)
        if said is not None:
            raise TrainError(said)
        yield


def _result(config: RunConfig, state: "TrainState", source: Loader, last: Path, asked: bool) -> RunResult:
    finished = state.step >= config.schedule.steps
    used_up = not finished and source.is_used_up()
    return RunResult(config.out, state.step, last, finished, asked, used_up, source.report())


def _build_state(
    config: RunConfig, model_config: MindVLConfig, place: "Place", *, load_init: bool, cores: frozenset[int]
) -> "tuple[TrainState, Loader]":
    """Model, optimizer and data at the start of the run; the data also by itself, as what it is."""
    from mindvl_train.megatron.optimizer import build_optimizer, wrap_models
    from mindvl_train.megatron.pipeline import prepare_schedule
    from mindvl_train.peers import refuse_different_orders
    from mindvl_train.state import TrainState
    from mindvl_train.weights import build_models

    models = wrap_models(
        build_models(config, model_config, place.device, load_init=load_init),
        # Where no other rank has the same weights there is nothing to wait for.
        overlap=config.parallel.overlap and place.dp_size * place.cp_size > 1,
    )
    optimizer = build_optimizer(models, config.optimizer)
    prepare_schedule(models, optimizer)
    source = _loader(config, model_config, place, cores)
    try:
        refuse_different_orders(source.state_dict())
    except BaseException:
        source.close()
        raise
    return TrainState(models=models, optimizer=optimizer, source=source), source


def _loader(config: RunConfig, model_config: MindVLConfig, place: "Place", cores: frozenset[int]) -> Loader:
    """The data. All processes have it before one takes a pack, as the first looks for logs of an earlier start."""
    from mindvl_train.parallel import said_by_any

    failure: DataError | None = None
    try:
        source = Loader(
            _logged_data(config, writes=place.counts_packs),
            global_batch_size=config.global_batch_size,
            dp_rank=place.dp_rank,
            dp_size=place.dp_size,
            position_kind=model_config.position_kind,
            vocab_size=model_config.language.vocab_size,
            with_pixels=place.is_first_stage,
            on_thread_start=lambda: bind_thread(cores),
        )
    except DataError as error:
        failure = error
    said = said_by_any(None if failure is None else str(failure))
    if failure is not None:
        raise failure
    if said is not None:
        source.close()
        raise TrainError(said)
    return source


def _metrics(config: RunConfig, model_config: MindVLConfig, place: "Place", state: "TrainState") -> "Metrics":
    """What counts on every process; the first one alone opens sinks and writes the card of the run."""
    from mindvl_train.metrics.metrics import Metrics
    from mindvl_train.metrics.run_card import run_facts, write_card
    from mindvl_train.metrics.sinks import open_sinks

    sinks = []
    if place.is_first:
        sinks = open_sinks(config, state.step)
        write_card(config, model_config, place, start_step=state.step)
    facts = run_facts(config, model_config, place.device)
    return Metrics(sinks, config.metrics.every_steps, place, facts, state.models)


def _logged_data(config: RunConfig, *, writes: bool) -> DataConfig:
    """The data section with its logs in the directory of the run, where the recipe names no others.

    Args:
        writes: False for all but one of the processes that train the same packs.
    """
    if not writes:
        return replace(config.data, audit_log=None, quarantine_log=None)
    return replace(
        config.data,
        audit_log=config.data.audit_log or config.out / "audit.jsonl",
        quarantine_log=config.data.quarantine_log or config.out / "quarantine.jsonl",
    )


def model_config_of(config: RunConfig) -> MindVLConfig:
    """The model of a run, with the token ids of its tokenizer."""
    tokenizer = load_tokenizer(config.data.tokenizer)
    return for_tokenizer(config.model.resolve(), tokenizer.special_ids, len(tokenizer.hf))


def _checkpoints_to_resume(config: RunConfig, resume: Literal["auto", "never"] | Path) -> list[Path]:
    """The one that was named, or all of this run, newest first: older ones are for when it is damaged."""
    from mindvl_train.checkpoints.directory import newest_checkpoint, newest_first

    if isinstance(resume, Path):
        found = [newest_checkpoint(resume)]
    else:
        found = newest_first(config.out / "checkpoints")
        if found and resume == "never":
            raise TrainError(f"{config.out}: holds {found[0].name} already. Name a new `out`, or resume it.")
    config.out.mkdir(parents=True, exist_ok=True)
    return found
