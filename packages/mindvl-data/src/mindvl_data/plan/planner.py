# SPDX-License-Identifier: Apache-2.0
"""The plan: mixture -> sample -> row -> step, a pure function of index, configuration, seed and position.

Comes after the index and lengths, before any byte of content is read. Every process computes the same plan; which
rank works on which row is decided last (`rows_of_rank`), so the members of a step do not depend on how many ranks
there are. A step is cut from a window of rows in `_fill_window`: reordering rows for balance belongs there and
nowhere else.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindvl_data.config import DataConfig
from mindvl_data.errors import DataError
from mindvl_data.measure import sample_patches
from mindvl_data.plan.mixture import Mixture, effective_weights
from mindvl_data.plan.packing import Packer
from mindvl_data.plan.shuffle import EpochOrder
from mindvl_data.plan.sources import SourceIndex

logger = logging.getLogger(__name__)

_BLOCK = 1024  # positions of a source looked up at once
_PATCH_MARGIN = 1.25  # patches a row may have, relative to the mixture's average
_DENSITY_SHARDS = 16  # shards of a source looked at to find its average


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedSample:
    """One use of one sample."""

    source: int
    epoch: int
    shard: int
    row: int
    length: int  # tokens
    patches: int


Row = tuple[PlannedSample, ...]


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    step: int
    rows: tuple[Row, ...]  # of all ranks
    state_after: dict[str, Any]  # the planner's state once this step is done


class Planner:
    """Produces steps one after another; `state` is all it remembers."""

    def __init__(self, config: DataConfig, sources: Sequence[SourceIndex], *, rows_per_step: int) -> None:
        self._config = config
        self._sources = sources
        self._rows_per_step = rows_per_step
        weights = effective_weights([s.weight for s in sources], [s.index.is_text for s in sources], config.text_share)
        self._cursors = [
            _Cursor(source, number, seed=config.seed, window=config.shuffle_window)
            for number, source in enumerate(sources)
        ]
        capacity = config.packing.seq_length
        mean_tokens, patches_per_token, largest = _demand(sources, weights, config)
        self._mixture = Mixture(weights, unit=mean_tokens if config.weight_unit == "tokens" else 1.0)
        derived = max(int(_PATCH_MARGIN * patches_per_token * capacity), largest)
        self.max_patches: int = derived if config.packing.max_patches is None else config.packing.max_patches
        self._packer: Packer[PlannedSample] = Packer(
            capacity=capacity,
            max_patches=self.max_patches,
            patches_per_token=patches_per_token,
            buffer_size=config.packing.buffer_size,
        )
        self._step = 0
        self._totals: Counter[str] = Counter()  # over rows that hold something, see `figures`
        self._tokens_by_source: Counter[str] = Counter()
        self.drawn: Counter[str] = Counter()  # samples by source, those waiting in the packer included
        self.dropped: Counter[str] = Counter()  # samples by "source: reason"

    def next_step(self) -> PlannedStep | None:
        """The next step, or None when every source is used up."""
        rows = self._fill_window()
        if not any(rows):
            return None
        self._step += 1
        self._count(rows)
        return PlannedStep(step=self._step, rows=rows, state_after=self.state())

    def state(self) -> dict[str, Any]:
        """Everything the future depends on, as JSON values."""
        return {
            "step": self._step,
            "drawn_at": [[cursor.epoch, cursor.position] for cursor in self._cursors],
            "owed": self._mixture.owed.tolist(),
            "buffer": [[s.source, s.epoch, s.shard, s.row] for s in self._packer.items],
            "drawn": dict(self.drawn),
            "dropped": dict(self.dropped),
            "totals": dict(self._totals),
            "tokens_by_source": dict(self._tokens_by_source),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a `state()` of a planner with the same configuration and index; only for a fresh planner."""
        self._step = state["step"]
        for cursor, (epoch, position) in zip(self._cursors, state["drawn_at"], strict=True):
            cursor.seek(epoch, position)
            if cursor.is_exhausted:
                self._mixture.exhaust(cursor.number)
        self._mixture.owed[:] = state["owed"]
        for source, epoch, shard, row in state["buffer"]:
            tokens, patches = self._sources[source].lengths(shard)
            sample = PlannedSample(
                source=source, epoch=epoch, shard=shard, row=row, length=int(tokens[row]), patches=int(patches[row])
            )
            self._packer.add(sample, sample.length, sample.patches)
        self.drawn, self.dropped = Counter(state["drawn"]), Counter(state["dropped"])
        self._totals, self._tokens_by_source = Counter(state["totals"]), Counter(state["tokens_by_source"])

    def figures(self, state: dict[str, Any]) -> dict[str, Any]:
        """What the rows up to `state` looked like, over all ranks and all restarts."""
        totals = Counter(state["totals"])
        rows = max(1, totals["rows"])
        per_token = self._config.image.spatial_merge_size**2
        waiting = Counter(self._sources[source].name for source, *_ in state["buffer"])  # drawn, in no row yet
        mean = totals["patches"] / rows
        deviation = max(0.0, totals["patches_squared"] / rows - mean**2) ** 0.5
        return {
            "steps": state["step"],
            "rows": totals["rows"],
            "samples": totals["samples"],
            "tokens": totals["tokens"],
            "fill": totals["tokens"] / (rows * self._config.packing.seq_length),
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

    def _count(self, rows: Sequence[Row]) -> None:
        for row in filter(None, rows):
            patches = sum(sample.patches for sample in row)
            self._totals["rows"] += 1
            self._totals["samples"] += len(row)
            self._totals["tokens"] += sum(sample.length for sample in row)
            self._totals["patches"] += patches
            self._totals["patches_squared"] += patches**2
            self._totals["patches_max"] = max(self._totals["patches_max"], patches)
            for sample in row:
                self._tokens_by_source[self._sources[sample.source].name] += sample.length

    def _fill_window(self) -> tuple[Row, ...]:
        """The rows of the next step; at the very end the missing ones are empty, so that no sample is lost."""
        rows = []
        for _ in range(self._rows_per_step):
            while not self._packer.is_full and (sample := self._draw()) is not None:
                self._packer.add(sample, sample.length, sample.patches)
            rows.append(tuple(self._packer.next_row()))
        return tuple(rows)

    def _draw(self) -> PlannedSample | None:
        """The next sample of the mixture that fits into a row; None when there is none left."""
        while (number := self._mixture.next_source()) is not None:
            sample = self._next_usable(self._cursors[number])
            if sample is not None:
                self._mixture.took(number, sample.length if self._config.weight_unit == "tokens" else 1.0)
                self.drawn[self._sources[number].name] += 1
            if self._cursors[number].is_exhausted:
                self._mixture.exhaust(number)
            if sample is not None:
                return sample
        return None

    def _next_usable(self, cursor: "_Cursor") -> PlannedSample | None:
        source = self._sources[cursor.number]
        for _ in range(source.index.num_samples):
            sample = cursor.next()
            if sample is None:
                return None
            reason = self._drop_reason(sample)
            if reason is None:
                return sample
            self.dropped[f"{source.name}: {reason}"] += 1
        if cursor.is_exhausted:
            return None
        raise DataError(
            f"source {source.name!r} has no sample that fits a row of {self._config.packing.seq_length} tokens and "
            f"{self.max_patches} patches. {source.index.folder}. Raise data.packing.seq_length or lower max_pixels."
        )

    def _drop_reason(self, sample: PlannedSample) -> str | None:
        if sample.length == 0:
            return "unusable"
        if sample.length > self._config.packing.seq_length:
            return "too long"
        return "too many patches" if sample.patches > self.max_patches else None


def rows_of_rank(rows: Sequence[Row], *, dp_rank: int, dp_size: int) -> tuple[Row, ...]:
    """The rows of a step that one data-parallel rank works on, in order: dealt one by one."""
    return tuple(rows[dp_rank::dp_size])


class _Cursor:
    """A position in the endless (or capped) stream of one source."""

    def __init__(self, source: SourceIndex, number: int, *, seed: int, window: int) -> None:
        self.number = number
        self._source, self._seed, self._window = source, seed, window
        self.epoch, self.position = 0, 0
        self._block: tuple[int, int] | None = None
        self._values: list[tuple[int, int, int, int]] = []
        self._order: EpochOrder | None = None

    @property
    def is_exhausted(self) -> bool:
        return self._source.max_epochs is not None and self.epoch >= self._source.max_epochs

    def seek(self, epoch: int, position: int) -> None:
        self.epoch, self.position = epoch, position
        self._block, self._order = None, None

    def next(self) -> PlannedSample | None:
        if self.is_exhausted:
            return None
        block = (self.epoch, self.position // _BLOCK)
        if block != self._block:
            self._load(block)
        shard, row, length, patches = self._values[self.position % _BLOCK]
        sample = PlannedSample(
            source=self.number, epoch=self.epoch, shard=shard, row=row, length=length, patches=patches
        )
        self.position += 1
        if self.position == self._source.index.num_samples:
            self.epoch, self.position, self._order = self.epoch + 1, 0, None
        return sample

    def _load(self, block: tuple[int, int]) -> None:
        if self._order is None:
            self._order = EpochOrder(
                self._source.shard_sizes,
                window=self._window,
                seed=self._seed,
                source=self._source.name,
                epoch=self.epoch,
            )
        start = block[1] * _BLOCK
        stop = min(start + _BLOCK, self._order.num_samples)
        shards, rows = self._order.positions(start, stop)
        lengths, patches = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
        for shard in np.unique(shards).tolist():
            here = shards == shard
            shard_lengths, shard_patches = self._source.lengths(shard)
            lengths[here], patches[here] = shard_lengths[rows[here]], shard_patches[rows[here]]
        columns: list[NDArray[np.int64]] = [shards, rows, lengths, patches]
        self._values = list(zip(*(column.tolist() for column in columns), strict=True))
        self._block = block


def _demand(sources: Sequence[SourceIndex], weights: Sequence[float], config: DataConfig) -> tuple[float, float, int]:
    """Tokens per sample and patches per token of the mixture, and the most patches of a sample that fits a row.

    The means are those of a few shards. The most patches are looked for in all of them, by pictures alone: counting
    text could mean to measure a whole source before the first step.
    """
    per_token = config.image.spatial_merge_size**2
    samples_sum, tokens_sum, patches_sum, largest = 0.0, 0.0, 0.0, 0
    for source, weight in zip(sources, weights, strict=True):
        count = len(source.index.shards)
        for shard in source.index.shards:
            every = sample_patches(shard, source.rules)
            largest = max(largest, int(every[every < config.packing.seq_length * per_token].max(initial=0)))
        looked_at = np.unique(np.linspace(0, count - 1, min(count, _DENSITY_SHARDS)).astype(int)).tolist()
        lengths = [source.lengths(shard) for shard in looked_at]
        tokens = np.concatenate([pair[0] for pair in lengths]).astype(np.int64)
        patches = np.concatenate([pair[1] for pair in lengths]).astype(np.int64)
        fits = (tokens > 0) & (tokens <= config.packing.seq_length)
        if not fits.any():
            continue
        share = weight if config.weight_unit == "samples" else weight / float(tokens[fits].mean())
        samples_sum += share
        tokens_sum += share * float(tokens[fits].mean())
        patches_sum += share * float(patches[fits].mean())
    if not tokens_sum:
        return 1.0, 0.0, largest
    return tokens_sum / samples_sum, patches_sum / tokens_sum, largest
