# SPDX-License-Identifier: Apache-2.0
"""What a run would do, without doing it: stages are built on the meta device, no weights read, nothing written.

Beside run.py, which does it. Takes seconds and little memory for any model on any number of processes; what is missing
on this machine is listed.
"""

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mindvl_data import DataError, load_tokenizer
from mindvl_model import MindVLConfig, for_tokenizer, set_up_device
from mindvl_model.counts import count_parameters
from mindvl_model.parameters import PARTS, parameter_group
from mindvl_ops import OpsError, select_backends
from mindvl_ops.backend import backend_table
from mindvl_train.config import RunConfig
from mindvl_train.layouts import data_parallel_size, fewest_processes, layout_of
from mindvl_train.schedule import learning_rate

_PLANNED_TOKENS = 1 << 21  # of the first step; planning them takes seconds

if TYPE_CHECKING:
    from mindvl_train.layout_search.blocks import Kernels
    from mindvl_train.layout_search.memory import Memory


@dataclass(frozen=True, kw_only=True)
class StageCounts:
    """What one process of a pipeline stage holds; gradients are kept for what is trained, in fp32."""

    rank: int  # its first process
    layers: tuple[int, ...]  # language layers of each of its chunks
    has_vision: bool
    has_head: bool
    parameters: int
    trained: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int  # moments unless on the host, fp32 weights beside bf16 ones; over ranks with the same weights
    activation_bytes: int  # at the fullest moment of a step, by the planner's formulas, for operators of `device`


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """The answer; `as_dict` gives JSON values."""

    phase: str
    out: str
    model: dict[str, Any]  # family, parameters by part, which are trained
    layout: dict[str, Any]  # sizes, processes, ranks of each group of rank 0, microbatches, share of the bubble, device
    stages: tuple[StageCounts, ...]
    schedule: dict[str, Any]  # steps, rates, packs and tokens
    checkpoints: dict[str, Any]  # how many, bytes of each and at most at once, free bytes at their place
    operators: dict[str, str]  # operator -> backend
    start: dict[str, Any]  # what weights and position come from
    data: dict[str, Any] | None  # figures of the first packs, at most a step; None where they cannot be planned
    problems: tuple[str, ...]  # why this run could not start here and now

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)


def dry_run(config: RunConfig, *, num_processes: int | None = None, from_stage: str | None = None) -> DryRun:
    """Say what `run_training` would do.

    Args:
        num_processes: Of the whole run; None: as few as the layout takes.
        from_stage: The stage of a plan that will have written init.checkpoint by then, so that it need not exist yet.

    Raises:
        ModelError: The layout does not fit the model.
        TrainError: The layout does not fit the number of processes or packs.
    """
    device = set_up_device().device(0).type
    # Operators of an NPU are asked for where there is none too, to see whether a run would fit there.
    kernels = cast("Kernels", "npu" if config.ops.backend == "npu" else device)
    from mindvl_train.layout_search.measure import job_of, predict
    from mindvl_train.megatron.imagined import imagined_models, imagined_process

    problems = [*_unwritable_places(config), *missing_paths(config, from_stage)]
    model_config = _model_config(config, problems)
    processes = num_processes or fewest_processes(config)
    dp_size = data_parallel_size(config, processes)
    layout = layout_of(config)
    planned = predict(job_of(config, processes), processes, kernels)
    stages: list[StageCounts] = []
    groups: dict[str, list[int]] = {}
    for stage in range(config.parallel.pp_size):
        rank = stage * (processes // config.parallel.pp_size)
        with imagined_process(rank, processes, config.parallel) as found:
            models = imagined_models(model_config, layout)
            groups = groups or found
            stages.append(_count(config, models, planned[rank], rank=rank, processes=processes))
    trained, all_parameters = _trained(config, model_config)
    return DryRun(
        phase=config.phase,
        out=str(config.out),
        model={
            "family": model_config.language.kind,
            "parameters": all_parameters,
            "trained": trained,
            "precision": config.precision,
        },
        layout=_layout(config, processes, dp_size, groups) | {"device": kernels},
        stages=tuple(stages),
        schedule=_schedule(config),
        checkpoints=_checkpoints(config, sum(all_parameters.values()), sum(trained.values()), problems),
        operators=_operators(config, device, problems),
        start=_start(config, from_stage),
        data=None if any(one.startswith("data.") for one in problems) else _first_step(config, dp_size),
        problems=tuple(problems),
    )


def _count(config: RunConfig, models: list[Any], planned: "Memory", *, rank: int, processes: int) -> StageCounts:
    parallel = config.parallel
    per_stage = processes // parallel.pp_size
    sizes: Counter[str] = Counter()
    weight_bytes, optimizer_bytes = 0, 0.0
    for model in models:
        for name, parameter in model.named_parameters():
            sizes["all"] += parameter.numel()
            weight_bytes += parameter.numel() * parameter.element_size()
            if parameter_group(name) in config.trained_parts:
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
        activation_bytes=round(planned.activations + planned.temporary + planned.inputs),
    )


def _state_bytes(config: RunConfig) -> int:
    """Of one trained parameter in the optimizer: two fp32 moments, and an fp32 copy of a bf16 weight."""
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
    return {part: all_parameters[part] for part in PARTS if part in config.trained_parts}, all_parameters


def _layout(config: RunConfig, processes: int, dp_size: int, groups: dict[str, list[int]]) -> dict[str, Any]:
    parallel = config.parallel
    microbatches = config.global_batch_size // dp_size
    chunks_under_way = microbatches * parallel.virtual_stages
    return {
        "processes": processes,
        "tp_size": parallel.tp_size,
        "pp_size": parallel.pp_size,
        "virtual_stages": parallel.virtual_stages,
        "cp_size": parallel.cp_size,
        "ep_size": parallel.ep_size,
        "dp_size": dp_size,
        "groups_of_rank_0": groups,
        "microbatches": microbatches,
        "pipeline_bubble": (parallel.pp_size - 1) / (chunks_under_way + parallel.pp_size - 1),
        "recompute": config.recompute.kind,
    }


def _operators(config: RunConfig, device: str, problems: list[str]) -> dict[str, str]:
    """The backend of each operator; where this machine lacks it, as the recipe has it."""
    try:
        select_backends(config.ops, device)
    except OpsError as error:
        problems.append(str(error))
        return {pack.operator: config.ops.overrides.get(pack.operator, config.ops.backend) for pack in backend_table()}
    return {pack.operator: pack.chosen for pack in backend_table()}


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
    size = parameters * weight + trained * _state_bytes(config)
    kept_for_good = steps // keep if keep else 0
    at_once = min(count, config.checkpoints.keep_last + kept_for_good + 1)  # one more while it is written
    free = _free_bytes(config.out)
    if size * at_once > free:
        problems.append(
            f"{config.out}: checkpoints take up to {size * at_once / 1e9:,.1f} GB, but {free / 1e9:,.1f} GB are free. "
            "Name an `out` with more room, or lower checkpoints.keep_last."
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


def missing_paths(config: RunConfig, from_stage: str | None = None) -> Iterator[str]:
    """One sentence for each path that the recipe names and that is not there.

    Args:
        from_stage: The stage of a plan that will have written init.checkpoint by then.
    """
    named: list[tuple[str, Path | str]] = [("data.tokenizer", config.data.tokenizer)]
    named += [(f"data.sources.{number}.path", source.path) for number, source in enumerate(config.data.sources)]
    named += [
        (f"init.{name}", path)
        for name, path in vars(config.init).items()
        if path is not None and not (name == "checkpoint" and from_stage is not None)
    ]
    for key, path in named:
        if isinstance(path, Path) and not _exists(path):
            yield f"{key}: {path} does not exist. Make it, or name another place by {key}=PATH."


def _unwritable_places(config: RunConfig) -> Iterator[str]:
    """One sentence for each place that a training would write to and cannot."""
    places = [
        ("out", config.out),
        ("data.audit_log", config.data.audit_log),
        ("data.quarantine_log", config.data.quarantine_log),
        ("data.store.cache", config.data.store.cache),
    ]
    for key, place in places:
        blocked = None if place is None else _blocked_by(place, is_file=key.endswith("_log"))
        if blocked is not None:
            yield f"{key}: {place} cannot be written, because {blocked}. Name another place by {key}=PATH."


def _blocked_by(place: Path, *, is_file: bool) -> str | None:
    """Why a file or directory cannot be made at a place; None where nothing is in the way."""
    if is_file and place.is_dir():
        return "it is a directory"
    if is_file and _exists(place):  # a device, such as /dev/null, counts by itself
        return None if os.access(place, os.W_OK) else "it is not writable"
    above = place.absolute().parent if is_file else place.absolute()
    while not _exists(above):
        above = above.parent
    if not above.is_dir():
        return f"{above} is not a directory"
    return None if os.access(above, os.W_OK | os.X_OK) else f"{above} is not writable"


def _exists(path: Path) -> bool:
    """Whether there is something; not where its name is longer than the file system allows."""
    try:
        return path.exists()
    except OSError:
        return False


def _model_config(config: RunConfig, problems: list[str]) -> MindVLConfig:
    """The model with the ids of the tokenizer, or with its own where there is none yet."""
    resolved = config.model.resolve()
    if not _exists(config.data.tokenizer):
        return resolved
    try:
        tokenizer = load_tokenizer(config.data.tokenizer)
    except DataError as error:
        what = str(error)
        if error.__cause__ is not None:  # transformers tells in several lines how else one could be made
            directory = config.data.tokenizer
            what = f"{directory} holds no tokenizer. Name a directory with tokenizer.json by data.tokenizer=PATH."
        problems.append(f"data.tokenizer: {what}")
        return resolved
    return for_tokenizer(resolved, tokenizer.special_ids, len(tokenizer.hf))


def _first_step(config: RunConfig, dp_size: int) -> dict[str, Any]:
    """Figures of the first step, or of the first packs of one that would take long."""
    from mindvl_data.order.stats import order_stats

    packing, packs = config.data.packing, config.global_batch_size
    most = max(1, _PLANNED_TOKENS // packing.seq_length)
    if packs * packing.balance_steps <= most:
        return order_stats(config.data, num_packs=packs, dp_size=dp_size, microbatches=packs // dp_size)
    data = replace(config.data, packing=replace(packing, balance_steps=1))
    return order_stats(data, num_packs=1, dp_size=1, microbatches=min(packs, most))
