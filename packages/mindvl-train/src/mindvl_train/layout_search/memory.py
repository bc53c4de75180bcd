# SPDX-License-Identifier: Apache-2.0
"""Peak memory of each pipeline rank in a step, by part.

Comes after stages.py, before search.py. The peak is found by simulating megatron-core's 1F1B schedule, interleaved with
virtual stages.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from mindvl_model.parallel_config import (
    SMALLEST_OFFLOADED_BYTES,
    ParallelConfig,
    RecomputeConfig,
    carried_features,
)
from mindvl_train.layout_search.blocks import Block, Setting
from mindvl_train.layout_search.decoder import angles_bytes
from mindvl_train.layout_search.stages import Chunk, Run


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes by part on one rank."""

    parameters: float
    gradients: float  # fp32 buffers of trained parameters
    optimizer: float  # master weights and two moments of this rank
    inputs: float  # one pack on the device; the others of the step are on the host
    activations: float  # stored for backward, of all packs in flight
    temporary: float  # additional bytes at the peak; of the start, if that is the peak
    base: float = 0.0  # context, communication buffers, fragmentation
    activations_by: dict[str, float] = field(default_factory=dict)  # activations of vision, decoder, experts, head ...
    host: float = 0.0  # offloaded activations in host memory at the peak, of all packs in flight; not in the total

    @property
    def standing(self) -> float:
        """Bytes between steps, and one pack."""
        return self.parameters + self.gradients + self.optimizer + self.inputs + self.base

    @property
    def total(self) -> float:
        """Peak bytes."""
        return self.standing + self.activations + self.temporary

    def as_dict(self) -> dict[str, Any]:
        """Parts and total as JSON values."""
        return vars(self) | {"total": self.total}


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Numbers of parameters on one rank."""

    dense: int = 0
    experts: int = 0
    packed: int = 0
    trained_dense: int = 0
    trained_experts: int = 0


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """A chunk as the schedule meets it."""

    kept: float
    forward_peak: float
    backward_peak: float
    kinds: Mapping[str, float]  # bytes stored for backward by kind of layer
    host: float = 0.0  # bytes stored in host memory


class Ledger:
    """Memory of model chunks, cached."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._counts: dict[tuple[object, ...], Counts] = {}
        self._stretches: dict[tuple[object, ...], Stretch] = {}

    def rank(
        self,
        parallel: ParallelConfig,
        recompute: RecomputeConfig,
        own: Sequence[Chunk],
        *,
        pp_rank: int,
        dp_size: int,
        num_microbatches: int,
        offload: bool = False,
        base: float = 0.0,
    ) -> Memory:
        """Estimate the memory of one pipeline rank.

        Args:
            own: Chunks of the rank, in the order of virtual stages.
            dp_size: Data-parallel size, without context parallelism.
            offload: Whether optimizer moments are in host memory, which on a CPU is the memory of the rank.
        """
        setting = self.setting
        counts = [self.counts(chunk) for chunk in own]
        dense, experts = sum(one.dense for one in counts), sum(one.experts for one in counts)
        trained, trained_experts = sum(one.trained_dense for one in counts), sum(one.trained_experts for one in counts)
        copies = dp_size * parallel.cp_size
        expert_copies = max(1, copies * parallel.tp_size // parallel.ep_size)
        # fp32 weights need no master copy.
        state = (4 if setting.wide < 4 else 0) + (0 if offload and setting.kernels != "cpu" else 8)
        activations, temporary, kinds, host = self._fullest(parallel, recompute, own, pp_rank, num_microbatches)
        patch = setting.model.vision.in_channels * setting.model.vision.patch_size**2
        pack_bytes = setting.pack.patches * patch + 8 * 5 * setting.pack.tokens  # pixels are uint8
        parameters: float = setting.wide * (dense + experts + (trained + trained_experts if setting.lora else 0))
        if setting.lora is not None and setting.lora.base_bytes is not None:
            parameters -= (setting.wide - setting.lora.base_bytes) * sum(one.packed for one in counts)
        found = Memory(
            parameters=parameters,
            gradients=4.0 * (trained + trained_experts),
            optimizer=state * (trained / copies + trained_experts / expert_copies),
            inputs=float(pack_bytes),
            activations=activations,
            temporary=temporary,
            base=base,
            activations_by=kinds,
            host=host,
        )
        start = base + parameters + _start_bytes(counts, setting.wide)
        return replace(found, temporary=temporary + max(0.0, start - found.total))

    def counts(self, chunk: Chunk) -> Counts:
        """Numbers of parameters of a chunk on one rank."""
        if chunk.key not in self._counts:
            trained = [(block, count) for block, count in chunk.runs if block.trained]
            self._counts[chunk.key] = Counts(
                dense=sum(count * block.dense for block, count in chunk.runs),
                experts=sum(count * block.experts for block, count in chunk.runs),
                packed=sum(count * block.packed for block, count in chunk.runs),
                trained_dense=sum(count * block.trained_dense for block, count in trained),
                trained_experts=sum(count * block.trained_experts for block, count in trained),
            )
        return self._counts[chunk.key]

    def _fullest(
        self,
        parallel: ParallelConfig,
        recompute: RecomputeConfig,
        own: Sequence[Chunk],
        pp_rank: int,
        num_microbatches: int,
    ) -> tuple[float, float, dict[str, float], float]:
        """(bytes stored for backward, temporary bytes, stored bytes by kind of layer) at the peak; most bytes on the host."""
        stretches = [self._stretch(chunk, parallel, recompute) for chunk in own]
        size, virtual = parallel.pp_size, parallel.virtual_stages
        held, most, fullest, host = 0.0, 0.0, (0.0, 0.0), 0.0
        packs = [0] * len(own)  # in flight, by chunk
        packs_then = list(packs)
        for forward, number in schedule(size, virtual, pp_rank, min(num_microbatches, 4 * size)):
            stretch = stretches[number]
            if forward:
                packs[number] += 1
                peak = stretch.forward_peak
                host = max(host, sum(count * one.host for count, one in zip(packs, stretches, strict=True)))
            else:
                held -= stretch.kept
                peak = stretch.backward_peak
            if held + peak > most:
                kept = min(peak, stretch.kept)
                fullest = held + kept, peak - kept
                most, packs_then = sum(fullest), packs.copy()
            if forward:
                held += stretch.kept
            else:
                packs[number] -= 1
        kinds: defaultdict[str, float] = defaultdict(float)
        for stretch, count in zip(stretches, packs_then, strict=True):
            for kind, size_of_pack in stretch.kinds.items():
                kinds[kind] += count * size_of_pack
        # A partially executed chunk stores a part of its bytes; the fractions are those of complete chunks.
        scale = fullest[0] / max(1.0, sum(kinds.values()))
        return *fullest, {kind: scale * size for kind, size in kinds.items() if size}, host

    def _stretch(self, chunk: Chunk, parallel: ParallelConfig, recompute: RecomputeConfig) -> Stretch:
        piped = parallel.pp_size > 1
        boundary = self.setting.pack_bytes if piped else 0.0
        carried = carried_features(self.setting.model, parallel) * boundary  # deepstack features in a message
        message = boundary + carried
        key = (chunk.key, piped, parallel.virtual_stages, recompute, carried)
        if key not in self._stretches:
            angles = 0.0 if chunk.before else angles_bytes(self.setting)  # else part of the embedding
            # Gradients of output and input; with virtual stages also the next input and gradient, received in advance.
            received = (4 if parallel.virtual_stages > 1 else 2) * message
            stretch = stretch_of(_with_recomputation(chunk, recompute, self.setting))
            self._stretches[key] = Stretch(
                # The output of a stage is kept until its gradient is received. Of its input, the layers keep the rest.
                kept=stretch.kept + angles + (0 if chunk.after else message) + (0 if chunk.before else carried),
                forward_peak=stretch.forward_peak + angles,
                backward_peak=stretch.backward_peak + angles + received,
                kinds=stretch.kinds,
                host=sum(count * block.kept for block, count in offloaded_layers(chunk, recompute))
                * (self.setting.kernels != "cpu"),
            )
        return self._stretches[key]


def _start_bytes(counts: Iterable[Counts], wide: int) -> float:
    """Most bytes above the weights while megatron-core makes the buffers of each chunk, before the optimizer exists.

    Trained weights are copied to a buffer once gradients have theirs, first those of all layers but routed experts.
    """
    gradients = most = 0.0
    for one in counts:
        for trained in (one.trained_dense, one.trained_experts):
            gradients += 4.0 * trained
            most = max(most, gradients + wide * trained)
    return most


def stretch_of(runs: Iterable[Run]) -> Stretch:
    """Combine consecutive blocks; both peaks are relative to the bytes before them."""
    kept = forward_peak = backward_peak = 0.0
    kinds: defaultdict[str, float] = defaultdict(float)
    for block, count in runs:
        if not count:
            continue
        forward_peak = max(forward_peak, kept + (count - 1) * block.kept + block.forward_peak)
        kept += count * block.kept
        kinds[_kind(block)] += count * (block.kept - block.routed)
        kinds["experts"] += count * block.routed
        backward_peak = max(backward_peak, kept + block.backward_peak)
    return Stretch(kept=kept, forward_peak=forward_peak, backward_peak=backward_peak, kinds=kinds)


def _kind(block: Block) -> str:
    if block.part != "language":
        return block.part
    return block.name if block.name in ("prediction", "head") else "decoder"


def _with_recomputation(chunk: Chunk, recompute: RecomputeConfig, setting: Setting) -> Iterator[Run]:
    """Blocks of a chunk; recomputed layers store only their input."""
    if recompute.kind != "full":
        left = recompute.offload_layers
        yield from chunk.before
        for block, count in chunk.layers:
            away = min(left, count)
            left -= away
            yield offloaded(block, setting), away
            yield block, count - away
        yield from chunk.after
        return
    for block, count in chunk.before:  # of the vision encoder all layers, whatever `layers` is
        yield recomputed(block) if block.name == "vision layer" else block, count
    left = chunk.num_layers if recompute.layers is None else recompute.layers
    for block, count in chunk.layers:
        again = min(left, count)
        left -= again
        yield recomputed(block), again
        yield block, count - again
    yield from chunk.after


def recomputed(block: Block) -> Block:
    """The cost of a layer with recomputation."""
    if not block.kept:
        return block
    return replace(
        block,
        kept=block.boundary,
        routed=0.0,
        backward_peak=max(block.forward_peak, block.kept + block.backward_peak),
    )


def offloaded_layers(chunk: Chunk, recompute: RecomputeConfig) -> Iterator[Run]:
    """The layers of a chunk whose activations are in host memory."""
    left = recompute.offload_layers
    for block, count in chunk.layers:
        yield block, min(left, count)
        left -= min(left, count)


def offloaded(block: Block, setting: Setting) -> Block:
    """The cost of a layer with its activations in host memory.

    In forward the copies of the layer before may not be done; in backward the layer before is copied back in advance.
    Small tensors and integers, which stay on the device, are neglected, except in a layer whose input stays.
    """
    if setting.pack_bytes < SMALLEST_OFFLOADED_BYTES:
        return block
    on_cpu = setting.kernels == "cpu"  # the copies are in the same memory
    return replace(
        block,
        kept=block.kept if on_cpu else 0.0,
        routed=block.routed if on_cpu else 0.0,
        forward_peak=block.kept + block.forward_peak,
        backward_peak=2 * block.kept + block.backward_peak,
    )


@lru_cache(maxsize=4096)
def schedule(size: int, virtual: int, pp_rank: int, num_microbatches: int) -> tuple[tuple[bool, int], ...]:
    """(is forward, chunk of this rank) in the order of one pipeline rank, until the memory no longer changes.

    After the warm-up, each forward is followed by a backward, so a few steps are enough.
    """
    total = num_microbatches * virtual
    if virtual == 1:
        warmup = min(num_microbatches, size - pp_rank - 1)
    else:
        warmup = min(total, (size - pp_rank - 1) * 2 + (virtual - 1) * size)
    rounds = min(total - warmup, 1 if virtual == 1 else size * virtual)

    def chunk(step: int, *, forward: bool) -> int:
        number = step // size % virtual
        return number if forward else virtual - 1 - number

    steps = [(True, chunk(step, forward=True)) for step in range(warmup)]
    for step in range(rounds):
        steps += [(True, chunk(warmup + step, forward=True)), (False, chunk(step, forward=False))]
    return (*steps, *((False, chunk(step, forward=False)) for step in range(rounds, rounds + warmup)))
