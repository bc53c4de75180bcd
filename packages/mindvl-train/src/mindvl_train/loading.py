# SPDX-License-Identifier: Apache-2.0
"""The loaders of a run: that of the training data, and that of the validation data with the validator around it.

Comes after the process groups and before the first step; run.py calls it.
"""

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from mindvl_data import DataConfig, DataError, Loader
from mindvl_ops.runtime.affinity import bind_thread
from mindvl_train.config import RunConfig
from mindvl_train.errors import TrainError
from mindvl_train.resolved_run import ResolvedRun
from mindvl_train.validation.overlap import REMEDY, overlap

if TYPE_CHECKING:
    from mindvl_train.parallel_state import ParallelState
    from mindvl_train.state import TrainState
    from mindvl_train.validation.validator import Validator

logger = logging.getLogger(__name__)


def training_loader(run: ResolvedRun, ranks: "ParallelState", cores: frozenset[int]) -> Loader:
    """The loader of the training data, with logs in the output directory; collective over all ranks.

    Raises:
        DataError: This rank cannot open the data.
        TrainError: Another rank cannot, or has another data order.
    """
    data = _logged_data(run.config, writes=ranks.is_first_in_group)
    return _loader(run, ranks, cores, data, run.config.global_batch_size)


@contextmanager
def open_validator(
    run: ResolvedRun, ranks: "ParallelState", state: "TrainState", cores: frozenset[int]
) -> "Iterator[Validator | None]":
    """The validator of a run, or None without a `validation` section; collective over all ranks.

    Raises:
        TrainError: A shard is both in the training data and in the validation data.
    """
    from mindvl_train.parallel_state import first_message
    from mindvl_train.validation.generations import Generator
    from mindvl_train.validation.validator import Validator, packs_at_once, validation_data

    config = run.config.validation
    if config is None:
        yield None
        return
    problem = None
    if ranks.is_first:
        try:
            problem = overlap(run.config.data.sources, config, run.config.data.store)
        except DataError as error:  # raised again by the loader
            problem = None
            logger.debug("the overlap cannot be checked", exc_info=error)
        if problem is not None and config.allow_overlap:
            logger.warning("%s, as validation.allow_overlap accepts", problem)
            problem = None
    problem = first_message(None if problem is None else f"{problem}. {REMEDY}")
    if problem is not None:
        raise TrainError(problem)
    data = validation_data(run.config.data, config)
    with closing(_loader(run, ranks, cores, data, packs_at_once(run))) as source:
        generator = None if config.generations is None else Generator(run, config, state.models, ranks)
        yield Validator(run, source, state.models, ranks, generator)


def _loader(
    run: ResolvedRun, ranks: "ParallelState", cores: frozenset[int], data: DataConfig, global_batch_size: int
) -> Loader:
    """A loader. No rank takes a pack before all have one, because rank 0 first reads the logs of an earlier start."""
    from mindvl_train.agreement import check_data_order
    from mindvl_train.parallel_state import first_message

    failure: DataError | None = None
    try:
        source = Loader(
            data,
            global_batch_size=global_batch_size,
            dp_rank=ranks.dp_rank,
            dp_size=ranks.dp_size,
            position_kind=run.model.position_kind,
            vocab_size=run.model.language.vocab_size,
            with_pixels=ranks.is_first_stage,
            pin_memory=ranks.device.type != "cpu",
            on_thread_start=lambda: _start_thread(cores, ranks.device),
        )
    except DataError as error:
        failure = error
    problem = first_message(None if failure is None else str(failure))
    if failure is not None:
        raise failure
    if problem is not None:
        source.close()
        raise TrainError(problem)
    try:
        check_data_order(source.state_dict())
    except BaseException:
        source.close()
        raise
    return source


def _start_thread(cores: frozenset[int], device: torch.device) -> None:
    """Bind a thread of the loader; it allocates pinned memory, which must not create a context on another device."""
    bind_thread(cores)
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)


def _logged_data(config: RunConfig, *, writes: bool) -> DataConfig:
    """The data section with its logs in the output directory, unless the recipe names other paths.

    Args:
        writes: True for one rank of each model-parallel group.
    """
    if not writes:
        return replace(config.data, audit_log=None, quarantine_log=None)
    return replace(
        config.data,
        audit_log=config.data.audit_log or config.out / "audit.jsonl",
        quarantine_log=config.data.quarantine_log or config.out / "quarantine.jsonl",
    )
