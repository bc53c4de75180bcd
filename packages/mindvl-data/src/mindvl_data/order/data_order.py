# SPDX-License-Identifier: Apache-2.0
"""The data order: mixture -> sample -> pack -> window -> step, a function of index, configuration, seed and position.

Comes after the index and lengths; it reads no sample. Every process computes the same order. Packs are assigned to ranks
last (`packs_of_rank`), so the samples of a step do not depend on the number of ranks. Packs are built for a few steps at
once, the balance window, and distributed over these steps by visual load.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from mindvl_data.config import DataConfig
from mindvl_data.errors import DataError
from mindvl_data.order.balance import balance_order
from mindvl_data.order.cursor import Cursor
from mindvl_data.order.demand import mixture_demand
from mindvl_data.order.mixture import Mixture, effective_weights
from mindvl_data.order.packing import Packer
from mindvl_data.order.sources import SourceIndex

_PATCH_MARGIN = 1.25  # patch limit of a pack relative to the average of the mixture


class OrderedSample(NamedTuple):
    """One use of one sample."""

    source: int
    epoch: int
    shard: int
    sample_index: int
    length: int  # tokens
    patches: int


Pack = tuple[OrderedSample, ...]
# Loops in C over the samples of a step, of which there are tens of thousands.
_LENGTH, _PATCHES, _ORDERED = attrgetter("length"), attrgetter("patches"), OrderedSample._make


@dataclass(frozen=True, kw_only=True)
class OrderedStep:
    step: int
    packs: tuple[Pack, ...]  # of all ranks
    state_after: dict[str, Any]  # the state of the data order after this step


class DataOrder:
    """Computes steps one after another; its position is `state`. Not thread-safe.

    It reads no sample, so any project that can read (shard, sample_index) can use it:

        files, tokenizer = ShardFiles(), load_tokenizer(config.tokenizer)
        sources = [SourceIndex(source, config, tokenizer, files) for source in config.sources]
        data_order = DataOrder(config, sources, global_batch_size=64)
        while (step := data_order.next_step()) is not None:
            for pack in packs_of_rank(step.packs, dp_rank=0, dp_size=8):
                samples = [sources[s.source].read(s.shard, s.sample_index) for s in pack]

    Args:
        sources: In the order of `config.sources`.
        global_batch_size: Packed sequences per optimizer step, over all ranks.
        on_draw: Called with each drawn sample and the number of packs built so far; for statistics.

    Attributes:
        shares: Target share of each source in the unit `config.weight_unit`; sums to 1.
        max_patches: Patch limit of a pack. If it is derived from the mixture, a larger sample shares its pack with text.
        largest_sample: Samples with more patches are dropped; not reached if the limit is derived from the mixture.
    """

    def __init__(
        self,
        config: DataConfig,
        sources: Sequence[SourceIndex],
        *,
        global_batch_size: int,
        on_draw: Callable[[OrderedSample, int], None] | None = None,
    ) -> None:
        self._config = config
        self._sources = sources
        self._global_batch_size = global_batch_size
        weights = effective_weights([s.weight for s in sources], [s.index.is_text for s in sources], config.text_share)
        self.shares: list[float] = weights
        self._on_draw = on_draw
        self._num_packed = 0
        self._cursors = [Cursor(source, seed=config.seed, window=config.shuffle_window) for source in sources]
        capacity = config.packing.seq_length
        mean_tokens, patches_per_token, largest = mixture_demand(sources, weights, config)
        self._mixture = Mixture(weights, unit=mean_tokens if config.weight_unit == "tokens" else 1.0)
        derived = max(int(_PATCH_MARGIN * patches_per_token * capacity), largest)
        limit = config.packing.max_patches
        self.max_patches: int = derived if limit is None else limit
        # The order depends on these too, so a state records them and a rank that computes others is refused.
        self._derived = [mean_tokens, patches_per_token, self.max_patches, weights]
        self.largest_sample: int = capacity * config.image.spatial_merge_size**2 if limit is None else limit
        self._packer: Packer[OrderedSample] = Packer(
            capacity=capacity,
            max_patches=self.max_patches,
            patches_per_token=patches_per_token,
            buffer_size=config.packing.buffer_size,
        )
        self._returned: deque[OrderedSample] = deque()  # drawn before, used before new samples
        self._window: list[tuple[Pack, ...]] = []  # steps that are built and not returned
        self._step = 0
        self._totals: Counter[str] = Counter()  # over packs that are not empty, see `figures`
        self._tokens_by_source: Counter[str] = Counter()
        self.drawn: Counter[str] = Counter()  # samples by source, including those in packer and window
        self.dropped: Counter[str] = Counter()  # samples by "source: reason"
        self._store_window()

    def next_step(self) -> OrderedStep | None:
        """The next step, or None when all sources reached `max_epochs`."""
        if not self._window:
            self._pack_window()
        if not self._window:
            return None
        packs = self._window.pop(0)
        self._step += 1
        self._count(packs)
        return OrderedStep(step=self._step, packs=packs, state_after=self.state())

    def state(self) -> dict[str, Any]:
        """The complete state as JSON values; large parts are shared with the states of other steps.

        `buffer` lists the samples that were drawn and are in no returned step: first those of the remaining packs of
        the window, whose sizes are in `window`, then those in the packer.
        """
        left = len(self._window)
        window, samples = self._window_counts, self._window_samples
        first = len(window) - left
        return {
            "step": self._step,
            "derived": self._derived,
            **self._after_window,
            "window": window[first:],
            "buffer": [sample for step in samples[first:] for sample in step] + self._waiting,
            "totals": dict(self._totals),
            "tokens_by_source": dict(self._tokens_by_source),
        }

    def load_state(self, state: dict[str, Any], changed_sources: Collection[str] = frozenset()) -> None:
        """Continue from a `state()` with the same configuration and index; only before the first step.

        Args:
            changed_sources: Names of sources whose data changed. They continue at the start of their next epoch; their
                waiting samples are dropped and counted, and the remaining samples of the window are packed again.
        """
        if state["derived"] not in (None, self._derived):
            raise DataError(
                "data.sources: tokens per sample, patches per token, the patch limit and the shares of the sources "
                f"were {state['derived']} at the checkpoint and are {self._derived} now. Restore the data and the "
                "versions of that run, or start a new run from its weights."
            )
        self._check_positions(state, changed_sources)
        self._step = state["step"]
        self.drawn, self.dropped = Counter(state["drawn"]), Counter(state["dropped"])
        self._totals, self._tokens_by_source = Counter(state["totals"]), Counter(state["tokens_by_source"])
        for number, (cursor, (epoch, position)) in enumerate(zip(self._cursors, state["drawn_at"], strict=True)):
            cursor.seek(epoch, position)
            if cursor.is_exhausted:
                self._mixture.exhaust(number)
        self._mixture.owed[:] = state["owed"]
        buffer = [OrderedSample(*values) for values in state["buffer"]]
        if changed_sources:
            self._returned.extend(sample for sample in buffer if self._is_kept(sample, changed_sources))
            self._restart_changed(changed_sources)
        else:
            waiting = iter(buffer)
            self._window = [tuple(tuple(next(waiting) for _ in range(n)) for n in step) for step in state["window"]]
            self._returned.extend(waiting)
        self._packer.num_packs = (self._step + len(self._window)) * self._global_batch_size
        self._store_window()

    def _check_positions(self, state: dict[str, Any], changed_sources: Collection[str]) -> None:
        """Refuse a state with samples that do not exist, except of changed sources."""
        for source, (_, position) in zip(self._sources, state["drawn_at"], strict=True):
            if position and position >= source.num_samples and source.name not in changed_sources:
                raise DataError(
                    f"{source.index.directory}: the state is at sample {position} of source {source.name!r}, which has "
                    f"{source.num_samples} samples. The state or the index is damaged: restore it from a copy."
                )
        for number, _, shard, sample_index, length, patches in state["buffer"]:
            sizes = self._sources[number].index.shards.sizes
            if self._sources[number].name in changed_sources:
                continue
            fits = 0 < length <= self._config.packing.seq_length
            if shard >= len(sizes) or sample_index >= sizes[shard] or not fits:
                raise DataError(
                    f"{self._sources[number].index.directory}: the state holds sample {sample_index} of shard {shard} of "
                    f"source {self._sources[number].name!r} with {length} tokens and {patches} patches, which does not "
                    "exist. The state or the index is damaged: restore it from a copy."
                )

    def figures(self, state: dict[str, Any]) -> dict[str, Any]:
        """Statistics of the packs up to `state`, over all ranks and restarts."""
        totals = Counter(state["totals"])
        packs = max(1, totals["packs"])
        per_token = self._config.image.spatial_merge_size**2
        waiting = Counter(self._sources[source].name for source, *_ in state["buffer"])  # drawn, in no step yet
        mean = totals["patches"] / packs
        deviation = max(0.0, totals["patches_squared"] / packs - mean**2) ** 0.5
        return {
            "steps": state["step"],
            "packs": totals["packs"],
            "samples": totals["samples"],
            "tokens": totals["tokens"],
            "packing_efficiency": totals["tokens"] / (packs * self._config.packing.seq_length),
            "visual_tokens": {
                "mean": mean / per_token,
                "max": totals["patches_max"] // per_token,
                "cv": deviation / mean if mean else 0.0,
                "limit": self.max_patches // per_token,
            },
            "tokens_by_source": dict(state["tokens_by_source"]),
            "samples_by_source": {name: count - waiting[name] for name, count in state["drawn"].items()},
            "dropped": dict(state["dropped"]),
        }

    def _count(self, packs: Sequence[Pack]) -> None:
        tokens: Counter[int] = Counter()
        for pack in filter(None, packs):
            patches = sum(map(_PATCHES, pack))
            self._totals["packs"] += 1
            self._totals["samples"] += len(pack)
            self._totals["tokens"] += sum(map(_LENGTH, pack))
            self._totals["patches"] += patches
            self._totals["patches_squared"] += patches**2
            self._totals["patches_max"] = max(self._totals["patches_max"], patches)
            for sample in pack:
                tokens[sample.source] += sample.length
        for source, count in tokens.items():
            self._tokens_by_source[self._sources[source].name] += count

    def _pack_window(self) -> None:
        """Build the packs of a window and distribute them over its steps.

        At the end of the data the last step is filled up with empty packs, so that no sample is lost.
        """
        packs: list[Pack] = []
        while len(packs) < self._config.packing.balance_steps * self._global_batch_size and (pack := self._next_pack()):
            packs.append(pack)
        num_whole = len(packs) // self._global_batch_size * self._global_batch_size
        order = list(range(num_whole))
        if num_whole and self._config.packing.balance_steps > 1:
            loads = np.array([sum(map(_PATCHES, pack)) for pack in packs[:num_whole]], np.int64)
            width = self._config.packing.balance_width
            order = balance_order(loads, global_batch_size=self._global_batch_size, width=width).tolist()
        balanced = [packs[number] for number in order]
        if len(packs) > num_whole:
            balanced += packs[num_whole:] + [()] * (num_whole + self._global_batch_size - len(packs))
        self._window = [
            tuple(balanced[start : start + self._global_batch_size])
            for start in range(0, len(balanced), self._global_batch_size)
        ]
        self._store_window()

    def _next_pack(self) -> Pack:
        for _ in range(self._packer.num_missing):
            sample = self._next_sample()
            if sample is None:
                break
            self._packer.add(sample, sample.length, sample.patches)
            if self._on_draw is not None:
                self._on_draw(sample, self._num_packed)
        self._num_packed += 1
        return tuple(self._packer.next_pack())

    def _store_window(self) -> None:
        """Store the parts of the state that all steps of a window share."""
        self._after_window = {
            "drawn_at": [[cursor.epoch, cursor.position] for cursor in self._cursors],
            "owed": self._mixture.owed.tolist(),
            "drawn": dict(self.drawn),
            "dropped": dict(self.dropped),
        }
        self._window_counts = [[len(pack) for pack in step] for step in self._window]
        self._window_samples = [list(chain.from_iterable(step)) for step in self._window]
        self._waiting = [*self._packer.items, *self._returned]

    def _next_sample(self) -> OrderedSample | None:
        return self._returned.popleft() if self._returned else self._draw()

    def _draw(self) -> OrderedSample | None:
        """The next sample of the mixture that fits into a pack; None if no sample is left."""
        while (number := self._mixture.next_source()) is not None:
            sample = self._next_usable(number)
            if sample is not None:
                self._mixture.took(number, self._amount(sample))
                self.drawn[self._sources[number].name] += 1
            if self._cursors[number].is_exhausted:
                self._mixture.exhaust(number)
            if sample is not None:
                return sample
        return None

    def _next_usable(self, number: int) -> OrderedSample | None:
        source, cursor = self._sources[number], self._cursors[number]
        for _ in range(source.num_samples):
            values = cursor.next()
            if values is None:
                return None
            sample = _ORDERED((number, *values))
            reason = self._drop_reason(sample)
            if reason is None:
                return sample
            self.dropped[f"{source.name}: {reason}"] += 1
        if cursor.is_exhausted:
            return None
        raise DataError(
            f"{source.index.directory}: source {source.name!r} has no sample that fits a pack of "
            f"{self._config.packing.seq_length} tokens and {self.largest_sample} patches. Raise data.packing.seq_length or "
            "lower max_pixels."
        )

    def _drop_reason(self, sample: OrderedSample) -> str | None:
        if sample.length == 0:
            return "unusable"
        if sample.length > self._config.packing.seq_length:
            return "too long"
        return "too many patches" if sample.patches > self.largest_sample else None

    def _amount(self, sample: OrderedSample) -> float:
        return sample.length if self._config.weight_unit == "tokens" else 1.0

    def _is_kept(self, sample: OrderedSample, changed_sources: Collection[str]) -> bool:
        """Whether a waiting sample can still be used; if not, undo its effect on the mixture."""
        name = self._sources[sample.source].name
        # Changed data have other averages, so a limit derived from them can be lower than before.
        reason = "data changed" if name in changed_sources else self._drop_reason(sample)
        if reason is not None:
            self.dropped[f"{name}: {reason}"] += 1
            self.drawn[name] -= 1
            self._mixture.took(sample.source, -self._amount(sample))
        return reason is None

    def _restart_changed(self, changed_sources: Collection[str]) -> None:
        for number, (source, cursor) in enumerate(zip(self._sources, self._cursors, strict=True)):
            if source.name in changed_sources:
                cursor.seek(cursor.epoch + (cursor.position > 0), 0)
            if cursor.is_exhausted:
                self._mixture.exhaust(number)  # also if it got a balance back: the others share it


def packs_of_rank(packs: Sequence[Pack], *, dp_rank: int, dp_size: int) -> tuple[Pack, ...]:
    """The packs of a step assigned to one data-parallel rank: every dp_size-th pack, starting at dp_rank."""
    return tuple(packs[dp_rank::dp_size])
