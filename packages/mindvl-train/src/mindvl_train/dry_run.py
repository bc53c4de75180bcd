# SPDX-License-Identifier: Apache-2.0
"""Dry run: what a run would do, with stages built on the meta device; no weights are read and nothing is written.

Follows run.py. Takes seconds and little memory for any model on any number of processes; problems of this machine, such
as missing files, are listed.
"""

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mindvl_data import DataError
from mindvl_model import MindVLConfig, set_up_device
from mindvl_model.adapters.lora_config import quantization_problem
from mindvl_model.counts import count_parameters
from mindvl_model.parameters import PARTS
from mindvl_ops import OpsError, select_backends
from mindvl_ops.backend import backend_table
from mindvl_train.adapters import trained_parameters
from mindvl_train.config import RunConfig
from mindvl_train.memory_warning import memory_warning
from mindvl_train.rates import learning_rate
from mindvl_train.reading import reads_of, start_timeout
from mindvl_train.rehearsal.store import rehearsal_facts
from mindvl_train.resolved_run import ResolvedRun, capacity_warning, min_processes, resolve_run, tokenized_model
from mindvl_train.validation.overlap import validation_facts

_MAX_TOKENS = 1 << 21  # of the first step; packing them takes seconds
_LONG_WINDOW = 16  # optimizer steps of the balance window that a warning proposes where 4 are not enough

if TYPE_CHECKING:
    from mindvl_train.layout_search.blocks import Kernels
    from mindvl_train.layout_search.memory import Memory


@dataclass(frozen=True, kw_only=True)
class StageCounts:
    """Sizes of one process of a pipeline stage; gradients are fp32, of trained parameters only."""

    rank: int  # first process of the stage
    layers: tuple[int, ...]  # language layers of each model chunk
    has_vision: bool
    has_head: bool
    parameters: int
    trained: int
    weight_bytes: int
    gradient_bytes: int
    # Moments unless offloaded, fp32 copies of bf16 weights; sharded over ranks of the same weights.
    optimizer_bytes: int
    activation_bytes: int  # peak of a step, estimated by the layout search, for the operators of `device`
    host_activation_bytes: int  # offloaded activations in host memory at the peak, estimated


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """Result of a dry run."""

    phase: str
    out: str
    model: dict[str, Any]  # family, parameters by part, trained parameters
    # Sizes, processes, groups of rank 0, microbatches, pipeline bubble (fraction of a step), device.
    layout: dict[str, Any]
    stages: tuple[StageCounts, ...]
    rehearsal: dict[str, Any]  # rehearsals of this recipe in its output directory, and how long one takes
    schedule: dict[str, Any]  # steps, learning rates, packs and tokens
    checkpoints: dict[str, Any]  # count, bytes of one, largest total, free bytes of the file system
    operators: dict[str, str]  # operator -> backend
    start: dict[str, Any]  # source of the weights and of the position; bytes and seconds of reading them
    # Samples by source, steps, what follows from the loss; None: no validation.
    validation: dict[str, Any] | None = None
    data: dict[str, Any] | None  # statistics of the first packs, at most one step; None if there is no data
    warnings: tuple[str, ...]  # settings that make the run slower than it could be
    problems: tuple[str, ...]  # reasons why the run could not start on this machine

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)


def dry_run(config: RunConfig, *, num_processes: int | None = None, from_stage: str | None = None) -> DryRun:
    """Describe what `run_training` would do.

    Args:
        num_processes: Processes of the run; None: the minimum of the parallel layout.
        from_stage: Training stage that writes init.checkpoint before this one starts, so that it need not exist yet.

    Raises:
        TrainError: The parallel layout does not fit the model, the number of processes or the global batch size.
    """
    own_device = set_up_device().device(0)
    device = own_device.type
    # ops.backend=npu estimates the memory of a run on NPUs on a machine without one.
    kernels = cast("Kernels", "npu" if config.ops.backend == "npu" else device)
    from mindvl_train.adapters import choose_trained
    from mindvl_train.layout_search.measure import job_of, predict
    from mindvl_train.megatron.fake_groups import fake_process_groups, meta_models

    problems = [*_unwritable_places(config), *missing_paths(config, from_stage)]
    unquantized = quantization_problem(config.adapter, kernels)
    if unquantized is not None:
        problems.append(unquantized)
    model_config = _model_config(config, problems)
    run = resolve_run(config, num_processes or min_processes(config.parallel))
    job = job_of(config, run.num_processes)
    predicted = predict(job, kernels)
    stages: list[StageCounts] = []
    groups: dict[str, list[int]] = {}
    for stage in range(config.parallel.pp_size):
        rank = stage * (run.num_processes // config.parallel.pp_size)
        with fake_process_groups(rank, run.num_processes, run.parallel) as ranks_by_group:
            models = meta_models(model_config, run.build)
            for model in models:
                choose_trained(model, model_config, config)
            groups = groups or ranks_by_group
            stages.append(_count(run, models, predicted[rank], rank=rank))
    trained, all_parameters = _trained(config, model_config)
    has_data = not any(one.startswith("data.") for one in problems)
    balance_warning = _narrow_balance(run) if has_data else ()
    return DryRun(
        phase=config.phase,
        out=str(config.out),
        model={
            "family": model_config.language.family,
            "parameters": all_parameters,
            "trained": trained,
            "precision": config.precision,
            "precision_reason": config.precision_reason,
        },
        layout=_layout(run, groups) | {"device": kernels},
        stages=tuple(stages),
        rehearsal=rehearsal_facts(run, job.pack),
        schedule=_schedule(config),
        checkpoints=_checkpoints(config, sum(all_parameters.values()), sum(trained.values()), problems),
        operators=_operators(config, device, problems),
        start=_start(config, from_stage) | {"reads": _reads(run, from_stage)},
        validation=validation_facts(config, problems),
        data=_first_step(run) if has_data else None,
        warnings=(*memory_warning(run, own_device, kernels), *balance_warning, *capacity_warning(run)),
        problems=tuple(problems),
    )


def _count(run: ResolvedRun, models: list[Any], predicted: "Memory", *, rank: int) -> StageCounts:
    config, parallel = run.config, run.parallel
    per_stage = run.num_processes // parallel.pp_size
    sizes: Counter[str] = Counter()
    weight_bytes, optimizer_bytes = 0, 0.0
    for model in models:
        for name, parameter in model.named_parameters():
            sizes["all"] += parameter.numel()
            weight_bytes += parameter.numel() * parameter.element_size()
            if parameter.requires_grad:
                sizes["trained"] += parameter.numel()
                copies = per_stage // (parallel.ep_size if ".experts." in name else parallel.tp_size)
                on_device = _master_bytes(config) if config.optimizer.offload else _state_bytes(config)
                optimizer_bytes += parameter.numel() * on_device / copies
    return StageCounts(
        rank=rank,
        layers=tuple(len(model.language.decoder.layers) for model in models),
        has_vision=any(model.vision is not None for model in models),
        has_head=any(model.post_process for model in models),
        parameters=sizes["all"],
        trained=sizes["trained"],
        weight_bytes=weight_bytes,
        gradient_bytes=4 * sizes["trained"],
        optimizer_bytes=round(optimizer_bytes),
        activation_bytes=round(predicted.activations + predicted.temporary + predicted.inputs),
        host_activation_bytes=round(predicted.host),
    )


def _state_bytes(config: RunConfig) -> int:
    """Optimizer state per trained parameter: two fp32 moments, and an fp32 copy of a bf16 weight."""
    return 8 + _master_bytes(config)


def _master_bytes(config: RunConfig) -> int:
    return 4 if config.precision == "bf16" else 0


def _trained(config: RunConfig, model_config: MindVLConfig) -> tuple[dict[str, int], dict[str, int]]:
    counts = count_parameters(model_config)
    all_parameters = {
        "vision": counts.vision,
        "projector": counts.projector,
        "language": counts.language + counts.mtp,
    }
    return {str(part): count for part, count in trained_parameters(config, model_config).items()}, all_parameters


def _layout(run: ResolvedRun, groups: dict[str, list[int]]) -> dict[str, Any]:
    parallel = run.parallel
    chunk_passes = run.num_microbatches * parallel.virtual_stages
    return {
        "processes": run.num_processes,
        "tp_size": parallel.tp_size,
        "pp_size": parallel.pp_size,
        "virtual_stages": parallel.virtual_stages,
        "cp_size": parallel.cp_size,
        "ep_size": parallel.ep_size,
        "dp_size": run.dp_size,
        "groups_of_rank_0": groups,
        "microbatches": run.num_microbatches,
        "pipeline_bubble": (parallel.pp_size - 1) / (chunk_passes + parallel.pp_size - 1),
        "recompute": run.config.recompute.kind,
    }


def _operators(config: RunConfig, device: str, problems: list[str]) -> dict[str, str]:
    """The backend of each operator; the one in the recipe if this machine does not have it."""
    try:
        select_backends(config.ops, device)
    except OpsError as error:
        problems.append(str(error))
        return {
            entry.operator: config.ops.overrides.get(entry.operator, config.ops.backend) for entry in backend_table()
        }
    return {entry.operator: entry.chosen for entry in backend_table()}


def _schedule(config: RunConfig) -> dict[str, Any]:
    schedule = config.schedule
    peak = max(0, round(schedule.steps * schedule.lr_warmup_ratio) - 1)
    rates = {step + 1: learning_rate(schedule, step) for step in (0, peak, schedule.steps - 1)}
    tokens_per_step = config.global_batch_size * config.data.packing.seq_length
    return {
        "steps": schedule.steps,
        "learning_rate": rates,
        "global_batch_size": config.global_batch_size,
        "seq_length": config.data.packing.seq_length,
        "tokens_per_step": tokens_per_step,
        "tokens": tokens_per_step * schedule.steps,
    }


def _checkpoints(config: RunConfig, parameters: int, trained: int, problems: list[str]) -> dict[str, Any]:
    every, steps, keep = config.checkpoints.every_steps, config.schedule.steps, config.checkpoints.keep_every_steps
    count = -(-steps // every)
    weight = 2 if config.precision == "bf16" else 4
    stored = parameters if config.adapter is None else trained  # a checkpoint of adapters has no other weights
    size = stored * weight + trained * _state_bytes(config)
    kept_for_good = steps // keep if keep else 0
    keeps_best = config.validation is not None and config.checkpoints.keep_best
    if config.validation is not None and keeps_best:
        count += -(-steps // config.validation.every_steps)  # at most: each validation may find a lower loss
    # One more while a checkpoint is written.
    at_once = min(count, config.checkpoints.keep_last + kept_for_good + keeps_best + 1)
    free = _free_bytes(config.out)
    if size * at_once > free:
        problems.append(
            f"{config.out}: checkpoints need up to {size * at_once / 1e9:,.1f} GB, but {free / 1e9:,.1f} GB are free. "
            "Set an `out` with more space, or lower checkpoints.keep_last."
        )
    return {"written": count, "bytes": size, "at_once": at_once, "bytes_at_once": size * at_once, "free_bytes": free}


def _free_bytes(directory: Path) -> int:
    while not _exists(directory):
        directory = directory.absolute().parent
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def _start(config: RunConfig, from_stage: str | None) -> dict[str, Any]:
    from mindvl_train.checkpoints.directory import complete_checkpoints

    found = complete_checkpoints(config.out / "checkpoints")
    takes = {name: str(path) for name, path in vars(config.init).items() if path is not None}
    return {
        "resumes": str(found[-1]) if found else None,
        "init": takes,
        "from_stage": from_stage,
        "at_random": [] if {"checkpoint", "model"} & takes.keys() else [part for part in PARTS if part not in takes],
    }


def _reads(run: ResolvedRun, from_stage: str | None) -> dict[str, Any] | None:
    """Bytes and time of reading the weights, and the timeout of collectives; None if nothing is read."""
    start = _start(run.config, from_stage)
    if not start["resumes"] and not {"checkpoint", "model"} & start["init"].keys():
        return None  # at most the parts of a smaller model
    reads = reads_of(run, resumes=start["resumes"] is not None)
    return reads.as_dict() | {"timeout_s": start_timeout(run).total_seconds()}


def missing_paths(config: RunConfig, from_stage: str | None = None) -> Iterator[str]:
    """One message per path of the recipe that does not exist.

    Args:
        from_stage: Training stage that writes init.checkpoint before this one starts.
    """
    named: list[tuple[str, Path | str]] = [("data.tokenizer", config.data.tokenizer)]
    named += [(f"data.sources.{number}.path", source.path) for number, source in enumerate(config.data.sources)]
    if config.validation is not None:
        sources = enumerate(config.validation.sources)
        named += [(f"validation.sources.{number}.path", source.path) for number, source in sources]
        if config.validation.generations is not None and config.validation.generations.prompts is not None:
            named.append(("validation.generations.prompts", config.validation.generations.prompts))
    named += [
        (f"init.{name}", path)
        for name, path in vars(config.init).items()
        if path is not None and not (name == "checkpoint" and from_stage is not None)
    ]
    for key, path in named:
        if isinstance(path, Path) and not _exists(path):
            yield f"{key}: {path} does not exist. Create it, or set {key}=PATH."


def _unwritable_places(config: RunConfig) -> Iterator[str]:
    """One message per output path that is not writable."""
    outputs: list[tuple[str, Path | None]] = [
        ("out", config.out),
        ("data.audit_log", config.data.audit_log),
        ("data.quarantine_log", config.data.quarantine_log),
        ("data.store.cache", config.data.store.cache),
    ]
    for key, path in outputs:
        reason = None if path is None else _why_unwritable(path, is_file=key.endswith("_log"))
        if reason is not None:
            yield f"{key}: {path} is not writable: {reason}. Set {key}=PATH to another path."


def _why_unwritable(path: Path, *, is_file: bool) -> str | None:
    """The reason why a file or directory cannot be created or written; None if it can."""
    if is_file and path.is_dir():
        return "it is a directory"
    if is_file and _exists(path):  # also devices such as /dev/null
        return None if os.access(path, os.W_OK) else "permission denied"
    parent = path.absolute().parent if is_file else path.absolute()
    while not _exists(parent):
        parent = parent.parent
    if not parent.is_dir():
        return f"{parent} is not a directory"
    return None if os.access(parent, os.W_OK | os.X_OK) else f"no write permission for {parent}"


def _exists(path: Path) -> bool:
    """Whether the path exists; false for a name that is too long for the file system."""
    try:
        return path.exists()
    except OSError:
        return False


def _model_config(config: RunConfig, problems: list[str]) -> MindVLConfig:
    """The model with the token ids of its tokenizer, if that can be loaded."""
    if not _exists(config.data.tokenizer):
        return config.model.resolved
    try:
        return tokenized_model(config)
    except DataError as error:
        message = str(error)
        if error.__cause__ is not None:  # the message of transformers has several lines about other file formats
            directory = config.data.tokenizer
            message = f"{directory} has no tokenizer. Set data.tokenizer=PATH to a directory with tokenizer.json."
        problems.append(f"data.tokenizer: {message}")
        return config.model.resolved


def _first_step(run: ResolvedRun) -> dict[str, Any]:
    """Statistics of the first step, or of its first packs if the step is large."""
    from mindvl_data.order.stats import order_stats

    config, packs = run.config, run.config.global_batch_size
    packing = config.data.packing
    most = max(1, _MAX_TOKENS // packing.seq_length)
    if packs * packing.balance_steps <= most:
        return order_stats(config.data, num_packs=packs, dp_size=run.dp_size, microbatches=run.num_microbatches)
    data = replace(config.data, packing=replace(packing, balance_steps=1))
    return order_stats(data, num_packs=1, dp_size=1, microbatches=min(packs, most))


def _narrow_balance(run: ResolvedRun) -> Iterator[str]:
    """A warning if the images of the data are not balanced over as many ranks as the layout has."""
    packing, dp_size = run.config.data.packing, run.dp_size
    if dp_size <= packing.balance_width or packing.balance_steps == 1:
        return
    from mindvl_data.order.stats import expected_imbalance

    steps, packs = packing.balance_steps, run.config.global_batch_size
    settings = ((packing.balance_width, steps), (dp_size, steps), (dp_size, max(steps, _LONG_WINDOW)))
    sizes = {"num_packs": max(1, min(packs, _MAX_TOKENS // packing.seq_length)), "global_batch_size": packs}
    now, wide, long = expected_imbalance(run.config.data, **sizes, dp_size=dp_size, settings=settings)
    if now is None or wide is None or long is None:
        return
    is_long = wide[0] > 0.01 and long[0] < wide[0] / 2
    setting = f"balance_width={dp_size}" + (f" and balance_steps={_LONG_WINDOW}" if is_long else "")
    yield (
        f"data.packing.balance_width: {packing.balance_width} is less than the data-parallel size {dp_size}: the rank with "
        f"the most images has {now[0]:.1%} more of them than the average rank in a step, with {setting} it would have "
        f"{(long if is_long else wide)[0]:.1%} (estimated from the first packed sequences). Set data.packing.{setting} in a "
        "new run; it changes the data order."
    )
