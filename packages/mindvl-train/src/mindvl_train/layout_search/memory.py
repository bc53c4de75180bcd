# SPDX-License-Identifier: Apache-2.0
"""Bytes of each pipeline rank at the fullest moment of a step, by part.

Comes after stages.py, before search.py. The moment is found by walking the schedule of megatron-core: forward and
backward of chunks, one forward and one backward in turn after the first ones, interleaved with virtual stages.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from mindvl_model.parallel_config import ParallelConfig, RecomputeConfig
from mindvl_train.layout_search.blocks import Block, Setting
from mindvl_train.layout_search.stages import Chunk, Run


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes by part on one rank."""

    parameters: float
    gradients: float  # float32 buffers of what is trained
    optimizer: float  # master weights and two moments, this rank's share
    inputs: float  # one pack, as the loader hands it over; the others of the step wait on the host
    activations: float  # kept for backward, of all packs in flight
    temporary: float  # on top of them at the fullest moment
    base: float = 0.0  # context, communication buffers, fragmentation
    activations_by: dict[str, float] = field(default_factory=dict)  # activations of vision, decoder, experts, head ...

    @property
    def standing(self) -> float:
        """What is there between steps, and a pack."""
        return self.parameters + self.gradients + self.optimizer + self.inputs + self.base

    @property
    def total(self) -> float:
        """All of it."""
        return self.standing + self.activations + self.temporary

    def as_dict(self) -> dict[str, Any]:
        """Parts and total, for JSON."""
        return vars(self) | {"total": self.total}


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Parameters that stand on one rank."""

    dense: int = 0
    experts: int = 0
    trained_dense: int = 0
    trained_experts: int = 0


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """A chunk as the schedule meets it."""

    kept: float
    forward_peak: float
    backward_peak: float
    kinds: Mapping[str, float]  # kept, by what keeps it


class Ledger:
    """Memory of the chunks of one setting; what chunks have in common is counted once."""

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
        """What one pipeline rank holds.

        Args:
            own: Its chunks, in the order of their virtual stages.
            dp_size: Data-parallel ranks, without context parallel.
            offload: The two moments of the optimizer lie in the memory of the host.
        """
        setting = self.setting
        counts = [self.counts(chunk) for chunk in own]
        dense, experts = sum(one.dense for one in counts), sum(one.experts for one in counts)
        trained, trained_experts = sum(one.trained_dense for one in counts), sum(one.trained_experts for one in counts)
        copies = dp_size * parallel.cp_size
        expert_copies = max(1, copies * parallel.tp_size // parallel.ep_size)
        # A model in float32 is its own master.
        state = (4 if setting.wide < 4 else 0) + (0 if offload else 8)
        activations, temporary, kinds = self._fullest(parallel, recompute, own, pp_rank, num_microbatches)
        patch = setting.model.vision.in_channels * setting.model.vision.patch_size**2
        pack_bytes = setting.pack.patches * patch + 8 * 5 * setting.pack.tokens  # pixels cross as uint8
        return Memory(
            parameters=setting.wide * (dense + experts),
            gradients=4.0 * (trained + trained_experts),
            optimizer=state * (trained / copies + trained_experts / expert_copies),
            inputs=float(pack_bytes),
            activations=activations,
            temporary=temporary,
            base=base,
            activations_by=kinds,
        )

    def counts(self, chunk: Chunk) -> Counts:
        """Parameters of a chunk on one rank."""
        if chunk.key not in self._counts:
            trained = [(block, count) for block, count in chunk.runs if block.trained]
            self._counts[chunk.key] = Counts(
                dense=sum(count * block.dense for block, count in chunk.runs),
                experts=sum(count * block.experts for block, count in chunk.runs),
                trained_dense=sum(count * block.dense for block, count in trained),
                trained_experts=sum(count * block.experts for block, count in trained),
            )
        return self._counts[chunk.key]

    def _fullest(
        self,
        parallel: ParallelConfig,
        recompute: RecomputeConfig,
        own: Sequence[Chunk],
        pp_rank: int,
        num_microbatches: int,
    ) -> tuple[float, float, dict[str, float]]:
        """(kept, on top of it, what is kept by what keeps it) at the fullest moment."""
        stretches = [self._stretch(chunk, parallel, recompute) for chunk in own]
        size, virtual = parallel.pp_size, parallel.virtual_stages
        held, most, fullest = 0.0, 0.0, (0.0, 0.0)
        packs = [0] * len(own)  # in flight, by chunk
        packs_then = list(packs)
        for forward, number in schedule(size, virtual, pp_rank, min(num_microbatches, 4 * size)):
            stretch = stretches[number]
            if forward:
                packs[number] += 1
                peak = stretch.forward_peak
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
        # A chunk that is half done keeps a part of what it will; the shares are those of whole ones.
        scale = fullest[0] / max(1.0, sum(kinds.values()))
        return *fullest, {kind: scale * size for kind, size in kinds.items() if size}

    def _stretch(self, chunk: Chunk, parallel: ParallelConfig, recompute: RecomputeConfig) -> Stretch:
        piped = parallel.pp_size > 1
        key = (chunk.key, piped, recompute.kind, recompute.layers)
        if key not in self._stretches:
            boundary = self.setting.wide * self.setting.sliced * self.setting.model.language.hidden_size if piped else 0
            stretch = stretch_of(_with_recomputation(chunk, recompute))
            self._stretches[key] = Stretch(
                # What is sent on stays until its gradient has come back.
                kept=stretch.kept + (boundary if not chunk.after else 0),
                forward_peak=stretch.forward_peak,
                backward_peak=stretch.backward_peak + 2 * boundary,
                kinds=stretch.kinds,
            )
        return self._stretches[key]


def stretch_of(runs: Iterable[Run]) -> Stretch:
    """Blocks that run one after the other; both peaks are above what was held before them."""
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


def _with_recomputation(chunk: Chunk, recompute: RecomputeConfig) -> Iterator[Run]:
    """The chunk's blocks, where recomputed layers keep their input alone."""
    if recompute.kind != "full":
        yield from chunk.runs
        return
    whole = recompute.layers is None
    for block, count in chunk.before:
        yield recomputed(block) if whole and block.name == "vision layer" else block, count
    left = chunk.num_layers if recompute.layers is None else recompute.layers
    for block, count in chunk.layers:
        again = min(left, count)
        left -= again
        yield recomputed(block), again
        yield block, count - again
    yield from chunk.after


def recomputed(block: Block) -> Block:
    """A layer whose forward runs again before its backward."""
    if not block.kept:
        return block
    return replace(
        block,
        kept=block.boundary,
        routed=0.0,
        backward_peak=max(block.forward_peak, block.kept + block.backward_peak),
    )


@lru_cache(maxsize=4096)
def schedule(size: int, virtual: int, pp_rank: int, num_microbatches: int) -> tuple[tuple[bool, int], ...]:
    """(forward or backward, own chunk) in the order one pipeline rank runs them, until nothing new is held.

    After the first ones each forward is followed by a backward, so a few more than what is in flight are enough.
    """
    total = num_microbatches * virtual
    if virtual == 1:
        warmup = min(num_microbatches, size - pp_rank - 1)
    else:
        warmup = min(total, (size - pp_rank - 1) * 2 + (virtual - 1) * size)
    rounds = min(total - warmup, 1 if virtual == 1 else size * virtual)

    def chunk(step: int, *, forward: bool) -> int:
        place = step // size % virtual
        return place if forward else virtual - 1 - place

    steps = [(True, chunk(step, forward=True)) for step in range(warmup)]
    for step in range(rounds):
        steps += [(True, chunk(warmup + step, forward=True)), (False, chunk(step, forward=False))]
    return (*steps, *((False, chunk(step, forward=False)) for step in range(rounds, rounds + warmup)))
