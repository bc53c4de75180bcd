# SPDX-License-Identifier: Apache-2.0
"""A position in the endless (or capped) stream of samples of one source.

Comes after shuffle and lengths; the data_order has one for each source. Lengths are looked up for a block of positions
at once, so that each shard of the block is opened once; the first blocks are small, so that a mixture of hundreds of
sources starts at once.
"""

import numpy as np
from numpy.typing import NDArray

from mindvl_data.order.shuffle import EpochOrder
from mindvl_data.order.sources import SourceIndex

_FIRST_BLOCK, _LARGEST_BLOCK = 16, 1024  # positions looked up at once; blocks grow by four


class Cursor:
    """Where a source stands; `epoch` and `position` are all it remembers."""

    def __init__(self, source: SourceIndex, *, seed: int, window: int) -> None:
        self._source, self._seed, self._window = source, seed, window
        self.epoch, self.position = 0, 0
        self._size = _FIRST_BLOCK
        self._start = 0  # position of the first of `_values`
        self._values: NDArray[np.int64] = np.empty((0, 4), np.int64)
        self._order: EpochOrder | None = None

    @property
    def is_exhausted(self) -> bool:
        return self._source.max_epochs is not None and self.epoch >= self._source.max_epochs

    def seek(self, epoch: int, position: int) -> None:
        """Go to a position of an epoch."""
        self.epoch, self.position = epoch, position
        self._forget()

    def next(self) -> tuple[int, int, int, int, int] | None:
        """(epoch, shard, row, tokens, patches) of the next sample; None when the last epoch is over."""
        if self.is_exhausted:
            return None
        place = self.position - self._start
        if place == len(self._values):
            self._load()
            place = 0
        shard, row, length, patches = self._values[place].tolist()
        epoch = self.epoch
        self.position += 1
        if self.position == self._source.num_samples:
            self.epoch, self.position = self.epoch + 1, 0
            self._forget()
        return epoch, shard, row, length, patches

    def _forget(self) -> None:
        self._order, self._start, self._values = None, self.position, self._values[:0]

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
        values = np.empty((len(shards), 4), np.int64)
        values[:, 0] = shards
        for shard in np.unique(shards).tolist():
            here = np.flatnonzero(shards == shard)
            rows = self._source.subset.rows(shard, numbers[here])
            values[here, 1] = rows
            values[here, 2], values[here, 3] = self._source.lengths_of(shard, rows)
        self._values, self._start = values, self.position
        self._size = min(4 * self._size, _LARGEST_BLOCK)
