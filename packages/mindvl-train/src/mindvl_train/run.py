# SPDX-License-Identifier: Apache-2.0
"""RunConfig -> every object, in order: the only place that knows them all.

Read this first: device, groups, tokenizer, model, weights, gradient buffers, optimizer, data, checkpoint, loop.
"""

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from mindvl_data import DataConfig, Loader, load_tokenizer
from mindvl_model import MindVLConfig, enter, for_tokenizer
from mindvl_ops import check_operators, select_backends, table_text
from mindvl_ops.runtime.affinity import bind_thread
from mindvl_ops.runtime.start import device_kind, prepare_process
from mindvl_train.config import RunConfig
from mindvl_train.errors import TrainError
from mindvl_train.launch import local_place

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunResult:
    """Where a run ended."""

    out: Path
    step: int
    checkpoint: Path
    finished: bool  # False when it was asked to stop early
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
        resume: "auto" goes on from the newest checkpoint in config.out, "never" refuses a folder that has one,
            a path names the checkpoint.
        accept_data_change: Who accepts that sources changed, came or went since the checkpoint, such as user@host;
            None: such a checkpoint is refused.
        on_step: Told the number of finished steps after each one, and the mean loss when it was just reported.

    Raises:
        TrainError: The run cannot start or go on.
    """
    local_rank, num_local_ranks = local_place()
    prepared = prepare_process(  # before torch_npu is imported, which reads the variables
        os.environ,
        device_kind(),
        local_rank=local_rank,
        num_local_ranks=num_local_ranks,
        binding=config.ops.runtime.bind_cores,
        memory_tight=config.ops.runtime.memory_tight,
    )
    accelerator = enter()
    # Imported here: these modules import megatron-core, which must find the device settled.
    from mindvl_train import checkpoints
    from mindvl_train.loop import train
    from mindvl_train.megatron.optimizer import build_optimizer, wrap_models
    from mindvl_train.megatron.pipeline import prepare_schedule
    from mindvl_train.metrics import Metrics
    from mindvl_train.parallel import process_groups
    from mindvl_train.state import TrainState
    from mindvl_train.weights import build_models

    select_backends(config.ops)
    with process_groups(accelerator, config.seed, config.parallel) as place, _stop_on_signal() as stop_asked:
        if config.packs_per_step % place.dp_size:
            raise TrainError(
                f"packs_per_step={config.packs_per_step} cannot be dealt to {place.dp_size} data-parallel ranks. "
                f"Use a multiple of {place.dp_size}."
            )
        found = _checkpoint_to_resume(config, resume)
        model_config = model_config_of(config)
        described = {
            "model": checkpoints.plain(model_config),
            "run": checkpoints.plain(config),
            "parents": [str(path) for path in vars(config.init).values() if path is not None],
        }
        models = wrap_models(
            build_models(config, model_config, place.device, load_init=found is None), overlap=config.parallel.overlap
        )
        optimizer = build_optimizer(models, config.optimizer)
        prepare_schedule(models, optimizer)
        source = Loader(
            _logged_data(config),
            packs_per_step=config.packs_per_step,
            dp_rank=place.dp_rank,
            dp_size=place.dp_size,
            position_kind=model_config.position_kind,
            on_thread_start=lambda: bind_thread(prepared.cores),
        )
        state = TrainState(models=models, optimizer=optimizer, source=source)
        try:
            if found is not None:
                checkpoints.resume(found, state, described, accept_data_change=accept_data_change)
                logger.info("resumed at step %d from %s", state.step, found)
            if place.is_first:
                logger.info("operators:\n%s", table_text(check_operators(device=place.device)))
            metrics = Metrics(
                _sinks(config, state.step) if place.is_first else [], config.metrics.every_steps, place.device
            )
            last = train(config, state, metrics, place, described, on_step=on_step, should_stop=stop_asked)
            metrics.close()
            return RunResult(config.out, state.step, last, state.step >= config.schedule.steps, source.report())
        finally:
            source.close()


def _logged_data(config: RunConfig) -> DataConfig:
    """The data section with its logs in the folder of the run, where the recipe names no others."""
    return replace(
        config.data,
        audit_log=config.data.audit_log or config.out / "audit.jsonl",
        quarantine_log=config.data.quarantine_log or config.out / "quarantine.jsonl",
    )


def model_config_of(config: RunConfig) -> MindVLConfig:
    """The model of a run, with the token ids of its tokenizer."""
    tokenizer = load_tokenizer(config.data.tokenizer)
    return for_tokenizer(config.model.resolve(), tokenizer.special_ids, len(tokenizer.hf))


def _checkpoint_to_resume(config: RunConfig, resume: Literal["auto", "never"] | Path) -> Path | None:
    from mindvl_train import checkpoints

    if isinstance(resume, Path):
        named = checkpoints.newest(resume)
        config.out.mkdir(parents=True, exist_ok=True)
        return named
    found = checkpoints.complete(config.out / "checkpoints")
    if found and resume == "never":
        raise TrainError(f"{config.out}: holds {found[-1].name} already. Name a new `out`, or resume it.")
    config.out.mkdir(parents=True, exist_ok=True)
    return found[-1] if found else None


def _sinks(config: RunConfig, resumed_step: int) -> list[Any]:
    from mindvl_train.sinks import JsonLines, Log, TensorBoard

    sinks: list[Any] = [JsonLines(config.out / "metrics.jsonl", resumed_step), Log()]
    if config.metrics.tensorboard:
        sinks.append(TensorBoard(config.out / "tensorboard", resumed_step))
    return sinks


@contextmanager
def _stop_on_signal() -> Iterator[Callable[[], bool]]:
    """SIGTERM asks for a checkpoint and an end after the current step; schedulers send it before they kill."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: asked.set())
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGTERM, before)
