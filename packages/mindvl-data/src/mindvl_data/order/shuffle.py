# SPDX-License-Identifier: Apache-2.0
"""A keyed permutation of the samples of a source with random access.

Used by the data order. Two levels: shards are permuted, then samples within windows of the resulting stream, so that
neighbours in the order are in few shards. Each level is a Feistel network with cycle walking (Luby and Rackoff 1988;
Black and Rogaway 2002), which needs no table of the size of the data and no generator state.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 4


class EpochOrder:
    """The order of one source in one epoch."""

    def __init__(
        self, shard_sizes: Sequence[int] | NDArray[np.int64], *, window: int, seed: int, source: str, epoch: int
    ) -> None:
        digest = hashlib.blake2b(f"{seed}\0{source}\0{epoch}".encode(), digest_size=16).digest()
        self._key = int.from_bytes(digest[8:], "little")
        shard_key = int.from_bytes(digest[:8], "little")
        self._shards = permute(np.arange(len(shard_sizes), dtype=np.uint64), len(shard_sizes), shard_key)
        self._ends = np.cumsum(np.array(shard_sizes, np.int64)[self._shards])
        self._window = window
        self.num_samples = int(self._ends[-1])

    def positions(self, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(shard, number in the shard) of the samples at positions start..stop-1; the cost depends on the size only."""
        stream = np.empty(stop - start, np.int64)
        done = start
        while done < stop:
            window = done // self._window
            low = window * self._window
            high = min(low + self._window, self.num_samples)
            end = min(stop, high)
            inside = np.arange(done - low, end - low, dtype=np.uint64)
            shuffled = permute(inside, high - low, (self._key + window * 0x9E3779B97F4A7C15) % 2**64)
            stream[done - start : end - start] = low + shuffled
            done = end
        slot = np.searchsorted(self._ends, stream, side="right")
        before = np.where(slot > 0, self._ends[slot - 1], 0)
        return self._shards[slot], stream - before


def permute(values: NDArray[np.uint64], size: int, key: int) -> NDArray[np.int64]:
    """A keyed permutation of range(size), evaluated at `values`."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    shift = np.uint64(half)
    keys = [np.uint64(_mix(key + number) & (2**64 - 1)) for number in range(_ROUNDS)]
    result = values.astype(np.uint64)
    pending = np.arange(len(result))
    while len(pending):
        current = result[pending]
        left, right = current >> shift, current & mask
        for round_key in keys:
            left, right = right, left ^ (_mix_array(right ^ round_key) & mask)
        current = (left << shift) | right
        result[pending] = current
        pending = pending[current >= np.uint64(size)]
    return result.astype(np.int64)


def _mix(value: int) -> int:
    """Finalizer of splitmix64."""
    value = (value + 0x9E3779B97F4A7C15) & (2**64 - 1)
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return value ^ (value >> 31)


def _mix_array(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
