# SPDX-License-Identifier: Apache-2.0
"""A position in the stream of samples of one source, over all epochs.

Comes after shuffle and lengths; the data order has one cursor per source. Lengths are read for a block of positions at
once, so that each shard of the block is opened once. The first blocks are small, so that a mixture of hundreds of
sources starts quickly.
"""

import numpy as np

from mindvl_data.order.shuffle import EpochOrder
from mindvl_data.order.sources import SourceIndex

_FIRST_BLOCK, _LARGEST_BLOCK = 16, 1024  # positions read at once; blocks grow by a factor of 4


class Cursor:
    """The position of a source; its state is `epoch` and `position`."""

    def __init__(self, source: SourceIndex, *, seed: int, window: int) -> None:
        self._source, self._seed, self._window = source, seed, window
        self.epoch, self.position = 0, 0
        self._size = _FIRST_BLOCK
        self._start = 0  # position of the first of `_values`
        self._values: list[tuple[int, int, int, int, int]] = []
        self._order: EpochOrder | None = None

    @property
    def is_exhausted(self) -> bool:
        return self._source.max_epochs is not None and self.epoch >= self._source.max_epochs

    def seek(self, epoch: int, position: int) -> None:
        """Move to a position of an epoch."""
        self.epoch, self.position = epoch, position
        self._forget()

    def next(self) -> tuple[int, int, int, int, int] | None:
        """(epoch, shard, sample_index, tokens, patches) of the next sample; None after the last epoch."""
        if self.is_exhausted:
            return None
        offset = self.position - self._start
        if offset == len(self._values):
            self._load()
            offset = 0
        values = self._values[offset]
        self.position += 1
        if self.position == self._source.num_samples:
            self.epoch, self.position = self.epoch + 1, 0
            self._forget()
        return values

    def _forget(self) -> None:
        self._order, self._start, self._values = None, self.position, []

    def _load(self) -> None:
        if self._order is None:
            self._order = EpochOrder(
                self._source.subset.sizes,
                window=self._window,
                seed=self._seed,
                source=self._source.name,
                epoch=self.epoch,
            )
        stop = min(self.position + self._size, self._order.num_samples)
        shards, numbers = self._order.positions(self.position, stop)
        values = np.empty((5, len(shards)), np.int64)
        values[0], values[1] = self.epoch, shards
        for shard in np.unique(shards).tolist():
            here = np.flatnonzero(shards == shard)
            rows = self._source.subset.rows(shard, numbers[here])
            values[2, here] = rows
            values[3, here], values[4, here] = self._source.lengths_of(shard, rows)
        self._values, self._start = list(zip(*values.tolist(), strict=True)), self.position
        self._size = min(4 * self._size, _LARGEST_BLOCK)
