# SPDX-License-Identifier: Apache-2.0
"""Search over all parallel layouts of a model on a cluster; the fastest layouts that fit into memory come first.

The last step of the layout search; the command `mindvl plan` prints the result. Invalid layouts are counted by reason.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from mindvl_model import MindVLConfig, ModelError
from mindvl_model.adapters import LoRAConfig
from mindvl_model.flops import pack_flops
from mindvl_model.parallel_config import ParallelConfig, RecomputeConfig, check_parallel
from mindvl_model.parameters import Part
from mindvl_train.layout_search.blocks import Setting
from mindvl_train.layout_search.memory import Ledger, Memory
from mindvl_train.layout_search.packs import Pack
from mindvl_train.layout_search.stages import Parts, balanced_counts, parts_of
from mindvl_train.layout_search.step_time import Clock, Machine, StepTime, step_time

# Device context, kernels and buffers of collectives, which are outside the tensor allocator and not measured here.
BASE_GB = {"cpu": 0.0, "cuda": 2.0, "npu": 3.0}
USABLE = 0.94  # usable fraction of device memory; the rest is allocator fragmentation
MAX_CP = 8
HOST_GB = 100  # host memory of one device for offloaded activations: an assumption, for servers of 1 TB and 8 devices


@dataclass(frozen=True, kw_only=True)
class Task:
    """Model, data and machine of a search."""

    model: MindVLConfig
    machine: Machine
    full_pack: Pack  # with the maximum number of images, for the memory estimate
    usual_pack: Pack  # with the average number of images, for the time estimate
    global_batch_size: int
    trained: tuple[Part, ...]
    lora: LoRAConfig | None = None  # adapters of the trained parts
    wide: int = 2  # bytes of a weight
    expert_imbalance: float = 1.3  # tokens of the busiest expert-parallel rank over the mean, for the memory estimate
    expert_capacity_factor: float | None = None  # of all layouts of the search

    @property
    def limit(self) -> float:
        """Usable bytes of a rank."""
        return 1e9 * USABLE * (self.machine.memory_gb or self.machine.device.memory_gb)

    @property
    def base(self) -> float:
        """Bytes of a rank that are not tensors."""
        return 1e9 * BASE_GB[self.machine.kernels]

    @cached_property
    def flops(self) -> int:
        """Floating-point operations of one step without recomputation, as in metrics."""
        pack, rows = self.usual_pack, self.usual_pack.num_loss_tokens
        trained: dict[str, Any] = {"trainable": self.trained, "adapted": self.lora is not None}
        work = pack_flops(self.model, pack.segments, pack.grids, num_loss_tokens=rows, **trained)
        return self.global_batch_size * work.total


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A parallel layout with its estimated memory and step time."""

    parallel: ParallelConfig
    recompute: RecomputeConfig
    offload: bool
    dp_size: int
    num_microbatches: int
    memory: tuple[Memory, ...]  # of each pipeline rank
    time: StepTime
    mfu: float

    @property
    def fullest(self) -> int:
        """The pipeline rank with the highest memory use."""
        return max(range(len(self.memory)), key=lambda rank: self.memory[rank].total)

    @property
    def bubble(self) -> float:
        """Fraction of the step that is pipeline bubble on the slowest rank."""
        return self.time.bubble / self.time.total


@dataclass(kw_only=True)
class Search:
    """Result of a search."""

    candidates: list[Candidate] = field(default_factory=list)  # layouts that fit, fastest first
    misses: list[Candidate] = field(default_factory=list)  # layouts that do not fit, lowest memory first
    refused: Counter[str] = field(default_factory=Counter)  # number of invalid layouts by reason
    num_fitting: int = 0
    num_full: int = 0  # number of layouts that do not fit


@dataclass(frozen=True)
class _Settings:
    """Blocks of one layer split, for memory and time."""

    ledger: Ledger
    parts: Parts
    clock: Clock
    timed: Parts


class Cache(dict[tuple[object, ...], _Settings]):
    """Blocks by layer split, shared between layouts."""


@dataclass(frozen=True)
class _Choice:
    """A layout without a time estimate."""

    parallel: ParallelConfig
    recompute: RecomputeConfig
    offload: bool
    need: float  # bytes of the rank with the highest memory use
    host: float  # offloaded activations in host memory, of the rank that has most
    standing: float  # of these, bytes that recomputation does not reduce


def search(task: Task, *, keep: int = 10) -> Search:
    """Evaluate all layouts; returns the fastest `keep` that fit, and the `keep` closest ones that do not."""
    found, cache = Search(), Cache()
    candidates: list[Candidate] = []
    misses: list[_Choice] = []
    for parallel in layouts(task, found.refused):
        tried = [choice for spread in spreads(task, parallel) for choice in _best(task, spread, cache, found.refused)]
        timed = [evaluate_choice(task, choice, cache) for choice in tried if _fits(task, choice)]
        # The first estimate skips ranks in the middle of the pipeline, so check all ranks here.
        timed = [candidate for candidate in timed if candidate.memory[candidate.fullest].total <= task.limit]
        if timed:
            candidates.append(min(timed, key=lambda candidate: candidate.time.total))
        elif tried:
            misses.append(min(tried, key=lambda choice: choice.need))
    found.num_fitting, found.num_full = len(candidates), len(misses)
    found.candidates = sorted(candidates, key=lambda candidate: candidate.time.total)[:keep]
    nearest = sorted(misses, key=lambda choice: choice.need)[:keep]
    found.misses = [evaluate_choice(task, miss, cache) for miss in nearest]
    return found


def layouts(task: Task, refused: Counter[str]) -> Iterator[ParallelConfig]:
    """All valid combinations of sizes, without `stage_layers` and what `spreads` adds."""
    language, machine = task.model.language, task.machine
    num_experts = language.experts.num_experts if language.experts is not None else 0
    for tp in _powers(machine.num_devices):
        for cp in _powers(machine.num_devices // tp):
            if machine.num_devices % (tp * cp):
                continue  # for example groups of 8 with 12 devices
            reason = _refusal(task, tp, cp)
            if reason is not None:
                refused[reason] += 1
                continue
            for pp in (
                size for size in range(1, language.num_layers + 3) if machine.num_devices // (tp * cp) % size == 0
            ):
                dp = machine.num_devices // (tp * cp * pp)
                if task.global_batch_size % dp:
                    refused[f"global_batch_size={task.global_batch_size} is not divisible by dp_size"] += 1
                    continue
                of_stage = tp * cp * dp
                for ep in _powers(of_stage) if num_experts else [1]:
                    if num_experts and (num_experts % ep or of_stage % ep):
                        refused[f"ep_size does not divide {num_experts} experts and the ranks of a stage"] += 1
                        continue
                    for virtual in _virtual(task, pp, task.global_batch_size // dp, refused):
                        yield ParallelConfig(tp_size=tp, cp_size=cp, pp_size=pp, ep_size=ep, virtual_stages=virtual)


def spreads(task: Task, parallel: ParallelConfig) -> list[ParallelConfig]:
    """The layout with a split vision encoder, if that is valid, and with images spread over tp and cp ranks."""
    tp, cp = parallel.tp_size, parallel.cp_size
    values = [False] * (_refusal(task, tp, cp, spread_images=False) is None) + [True] * (tp * cp > 1)
    factor = task.expert_capacity_factor if parallel.ep_size > 1 else None
    return [replace(parallel, spread_images=value, expert_capacity_factor=factor) for value in values]


def evaluate(
    task: Task,
    parallel: ParallelConfig,
    recompute: RecomputeConfig,
    *,
    offload: bool = False,
    cache: Cache | None = None,
) -> Candidate:
    """Estimate memory of every pipeline rank and step time of a layout with stage_layers."""
    settings = _settings(task, parallel, recompute, Cache() if cache is None else cache)
    counts = parallel.stage_layers or (len(settings.parts.layers),)
    dp_size = task.machine.num_devices // parallel.model_parallel_size
    time = step_time(
        settings.clock,
        settings.ledger,
        parallel,
        recompute,
        settings.timed.chunks(counts),
        dp_size=dp_size,
        num_microbatches=task.global_batch_size // dp_size,
        offload=offload,
    )
    machine = task.machine
    return Candidate(
        parallel=parallel,
        recompute=recompute,
        offload=offload,
        dp_size=dp_size,
        num_microbatches=task.global_batch_size // dp_size,
        memory=_memory(task, settings, parallel, recompute, range(parallel.pp_size), offload=offload),
        time=time,
        mfu=task.flops / (time.total * machine.peak * machine.num_devices),
    )


def evaluate_choice(task: Task, choice: _Choice, cache: Cache) -> Candidate:
    """Evaluate a layout of the search."""
    return evaluate(task, choice.parallel, choice.recompute, offload=choice.offload, cache=cache)


def with_stage_layers(task: Task, parallel: ParallelConfig, cache: Cache | None = None) -> ParallelConfig | None:
    """The layout with decoder layers assigned so that stages take equal time; None: too many chunks."""
    settings = _settings(task, parallel, RecomputeConfig(), Cache() if cache is None else cache)
    counts = balanced_counts(settings.timed, parallel, settings.clock.pack_s)
    if counts is None:
        return None
    return replace(parallel, stage_layers=counts if parallel.pp_size > 1 else None)


def _memory(
    task: Task,
    settings: _Settings,
    parallel: ParallelConfig,
    recompute: RecomputeConfig,
    ranks: Iterable[int],
    *,
    offload: bool,
) -> tuple[Memory, ...]:
    size = parallel.pp_size
    chunks = settings.parts.chunks(parallel.stage_layers or (len(settings.parts.layers),))
    dp_size = task.machine.num_devices // parallel.model_parallel_size
    return tuple(
        settings.ledger.rank(
            parallel,
            recompute,
            chunks[rank::size],
            pp_rank=rank,
            dp_size=dp_size,
            num_microbatches=task.global_batch_size // dp_size,
            offload=offload,
            base=task.base,
        )
        for rank in ranks
    )


def remedies(task: Task, parallel: ParallelConfig) -> list[Candidate]:
    """The same layout with recomputation or offloading, where it fits, fastest first.

    Args:
        parallel: A layout with stage_layers.
    """
    cache = Cache()
    choices = _fitting(task, parallel, cache)
    if choices[0].recompute.kind == "full":  # copies may cost less time than recomputation
        choices += _offloaded_activations(task, choices[0], cache)
    found = [evaluate_choice(task, one, cache) for one in choices if _fits(task, one)]
    return sorted(found, key=lambda candidate: candidate.time.total)


def _best(task: Task, parallel: ParallelConfig, cache: Cache, refused: Counter[str]) -> list[_Choice]:
    """The choices of a layout without stage_layers."""
    assigned = with_stage_layers(task, parallel, cache)
    if assigned is None:
        refused["more pipeline chunks than layers"] += 1
        return []
    return _fitting(task, assigned, cache)


def _fitting(task: Task, parallel: ParallelConfig, cache: Cache) -> list[_Choice]:
    """The least recomputation that fits; only if nothing fits, offloaded activations and offloaded moments.

    Returns:
        Choices that fit, or one that does not.
    """
    found: list[_Choice] = []
    for offload in (False, True):
        for kind in ("none", "selective", "full"):
            choice = _choice(task, parallel, RecomputeConfig(kind=kind), cache, offload=offload)
            if _fits(task, choice):
                return [*found, _fewest_layers(task, choice, cache) if kind == "full" else choice]
            if choice.standing > task.limit:  # neither recomputation nor offloaded activations help
                break
        else:
            found += _offloaded_activations(task, choice, cache)
    return found or [choice]


def _offloaded_activations(task: Task, choice: _Choice, cache: Cache) -> Iterator[_Choice]:
    """The fewest layers with activations on the host that fit, without recomputation if that is enough."""
    most = max(choice.parallel.stage_layers or (task.model.language.num_layers,))
    for kind in ("none", "selective"):
        found = _fewest(task, choice, cache, RecomputeConfig(kind=kind), "offload_layers", most)
        if found is not None:
            yield found
            return


def _choice(
    task: Task, parallel: ParallelConfig, recompute: RecomputeConfig, cache: Cache, *, offload: bool
) -> _Choice:
    """Memory of the ranks that can have the maximum: the first two, the last, and the first with most layers."""
    size = parallel.pp_size
    layers = [sum((parallel.stage_layers or (0,))[rank::size]) for rank in range(size)]
    settings = _settings(task, parallel, recompute, cache)
    ranks = sorted({0, min(1, size - 1), size - 1, layers.index(max(layers))})
    memory = _memory(task, settings, parallel, recompute, ranks, offload=offload)
    need, host, standing = (max(getattr(one, name) for one in memory) for name in ("total", "host", "standing"))
    return _Choice(parallel, recompute, offload, need, host, standing)


def _fits(task: Task, choice: _Choice) -> bool:
    return choice.need <= task.limit and choice.host <= 1e9 * HOST_GB


def _fewest_layers(task: Task, choice: _Choice, cache: Cache) -> _Choice:
    """The smallest number of recomputed layers per chunk that fits; `choice` recomputes all."""
    most = max(choice.parallel.stage_layers or (task.model.language.num_layers,))
    return _fewest(task, choice, cache, choice.recompute, "layers", most - 1) or choice


def _fewest(
    task: Task, choice: _Choice, cache: Cache, recompute: RecomputeConfig, field_name: str, most: int
) -> _Choice | None:
    """The same layout with the fewest layers in a field, from 1 to `most`, with which it fits; None: not with all."""
    best, low, high = None, 0, most + 1
    while low + 1 < high:
        middle = most if best is None else (low + high) // 2  # first all of them
        changed: dict[str, Any] = {field_name: middle}
        tried = _choice(task, choice.parallel, replace(recompute, **changed), cache, offload=choice.offload)
        if _fits(task, tried):
            best, high = tried, middle
        elif best is None:
            return None
        else:
            low = middle
    return best


def _settings(task: Task, parallel: ParallelConfig, recompute: RecomputeConfig, cache: Cache) -> _Settings:
    split = ("tp_size", "cp_size", "ep_size", "expert_capacity_factor")
    sizes: dict[str, Any] = {name: getattr(parallel, name) for name in split}
    key = (*sizes.values(), spread := bool(parallel.spread_images), kind := recompute.kind)
    if key not in cache:
        memory = Setting(
            model=task.model,
            pack=task.full_pack,
            trained=task.trained,
            lora=task.lora,
            wide=task.wide,
            kernels=task.machine.kernels,
            **sizes,
            spread_images=spread,
            recompute=kind,
            expert_imbalance=task.expert_imbalance,
        )
        usual = replace(memory, pack=task.usual_pack, expert_imbalance=1.0)
        cache[key] = _Settings(Ledger(memory), parts_of(memory), Clock(task.machine, usual), parts_of(usual))
    return cache[key]


def _refusal(task: Task, tp: int, cp: int, *, spread_images: bool = True) -> str | None:
    if tp > task.machine.per_server:
        return f"tensor parallel size exceeds the {task.machine.per_server} devices of a server"
    if cp > MAX_CP:
        return f"context parallel size above {MAX_CP}"
    try:
        check_parallel(task.model, ParallelConfig(tp_size=tp, cp_size=cp, spread_images=spread_images))
    except ModelError as error:
        return str(error).partition(". Use")[0]
    return None


def _virtual(task: Task, pp: int, packs: int, refused: Counter[str]) -> Iterator[int]:
    yield 1
    if pp == 1:
        return
    for virtual in (2, 3, 4):
        if pp * virtual > task.model.language.num_layers + 2:
            return
        if packs % pp:
            refused["microbatches not divisible by pp_size with virtual stages"] += 1
            return
        yield virtual


def _powers(limit: int) -> list[int]:
    return [2**power for power in range(limit.bit_length()) if 2**power <= limit]
