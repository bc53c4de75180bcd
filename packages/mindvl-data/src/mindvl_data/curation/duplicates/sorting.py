# SPDX-License-Identifier: Apache-2.0
"""External sort: rows with 64-bit keys -> sorted runs on disk -> one sorted stream.

Comes after the signatures, before the steps that look for equal or similar neighbours. Memory: a run of `memory_bytes` is
sorted at a time, and merging holds one block of each run, together at most `memory_bytes`. If all rows fit into one run,
nothing is written. Rows with equal keys keep the order in which they were added.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

Keys = NDArray[np.uint64]
Block = tuple[Keys, NDArray[Any]]

_SORT_COPIES = 4  # a run, its order, and the sorted copy are in memory at the same time
_MIN_BLOCK_ROWS = 1 << 12
_MASK_64 = (1 << 64) - 1


class SortedRuns:
    """Collects rows of a key and a value, and returns them ordered by key.

    Args:
        directory: Empty or missing directory for the runs.
        dtype: Type of a value, which may have fields.
        memory_bytes: Memory for sorting and merging.
    """

    def __init__(self, directory: Path, dtype: DTypeLike, *, memory_bytes: int) -> None:
        self._directory = directory
        self._dtype = np.dtype(dtype)
        row_bytes = 8 + self._dtype.itemsize
        self._run_rows = max(_MIN_BLOCK_ROWS, memory_bytes // (_SORT_COPIES * row_bytes))
        self._pending: list[Block] = []
        self._pending_rows = 0
        self._run_lengths: list[int] = []
        self.num_rows = 0

    @property
    def num_runs(self) -> int:
        """Runs on disk."""
        return len(self._run_lengths)

    def add(self, keys: Keys, values: NDArray[Any]) -> None:
        """Add rows; writes a run when enough rows are collected."""
        self.num_rows += len(keys)
        while len(keys):
            taken = min(len(keys), self._run_rows - self._pending_rows)
            self._pending.append((keys[:taken].copy(), values[:taken].astype(self._dtype)))
            self._pending_rows += taken
            keys, values = keys[taken:], values[taken:]
            if self._pending_rows == self._run_rows:
                self._write_run()

    def merged(self) -> Iterator[Block]:
        """Blocks of all rows, ascending by key; may be called once."""
        if not self._run_lengths:
            keys, values = self._sorted_pending()
            for start in range(0, len(keys), self._run_rows):
                yield keys[start : start + self._run_rows], values[start : start + self._run_rows]
            return
        if self._pending_rows:
            self._write_run()
        rows = max(_MIN_BLOCK_ROWS, self._run_rows // len(self._run_lengths))
        readers = [_Run(self._run_path(run), self._dtype, rows) for run in range(len(self._run_lengths))]
        while readers := [reader for reader in readers if reader.fill()]:
            yield _merge_step(readers)
        for run in range(len(self._run_lengths)):
            for path in self._run_path(run):
                path.unlink()

    def _run_path(self, run: int) -> tuple[Path, Path]:
        return self._directory / f"{run:06d}.keys", self._directory / f"{run:06d}.values"

    def _write_run(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        keys, values = self._sorted_pending()
        for path, array in zip(self._run_path(self.num_runs), (keys, values), strict=True):
            array.tofile(path)
        self._run_lengths.append(len(keys))

    def _sorted_pending(self) -> Block:
        blocks, self._pending, self._pending_rows = self._pending, [], 0
        if not blocks:
            return np.empty(0, np.uint64), np.empty(0, self._dtype)
        keys, values = np.concatenate([block[0] for block in blocks]), np.concatenate([block[1] for block in blocks])
        order = stable_order(keys)
        return keys[order], values[order]


class _Run:
    """Reads a run in blocks; `keys` and `values` are the rows that are not merged yet."""

    def __init__(self, paths: tuple[Path, Path], dtype: np.dtype[Any], block_rows: int) -> None:
        self._paths, self._dtype, self._block_rows = paths, dtype, block_rows
        self._position = 0
        self.is_last = False
        self.keys: Keys = np.empty(0, np.uint64)
        self.values: NDArray[Any] = np.empty(0, dtype)

    def fill(self) -> bool:
        """Read the next block if no row is left; False at the end of the run."""
        if not len(self.keys) and not self.is_last:
            start, rows = self._position, self._block_rows
            self.keys = np.fromfile(self._paths[0], np.uint64, rows, offset=8 * start)
            self.values = np.fromfile(self._paths[1], self._dtype, rows, offset=self._dtype.itemsize * start)
            self._position += len(self.keys)
            self.is_last = len(self.keys) < rows
        return len(self.keys) > 0

    def take(self, rows: int) -> Block:
        keys, values = self.keys[:rows], self.values[:rows]
        self.keys, self.values = self.keys[rows:], self.values[rows:]
        return keys, values


def _merge_step(readers: list[_Run]) -> Block:
    """Take every row that no unread row can precede: those before the smallest last key of a block, and equal ones up to
    the first run that may continue with this key, so that equal keys keep their order."""
    unfinished = [reader for reader in readers if not reader.is_last]
    taken: list[Block] = []
    if not unfinished:
        taken = [reader.take(len(reader.keys)) for reader in readers]
    else:
        bound = min(reader.keys[-1] for reader in unfinished)
        open_to_equal = True
        for reader in readers:
            rows = int(np.searchsorted(reader.keys, bound, side="right" if open_to_equal else "left"))
            if not reader.is_last and reader.keys[-1] == bound:
                open_to_equal = False
            taken.append(reader.take(rows))
    keys, values = np.concatenate([block[0] for block in taken]), np.concatenate([block[1] for block in taken])
    order = stable_order(keys)
    return keys[order], values[order]


def stable_order(keys: Keys) -> NDArray[np.int64]:
    """The order that sorts `keys` and keeps equal keys in place, as `np.argsort(keys, kind="stable")`.

    Sorting one integer made of the high bits of the key and the row is several times faster than an argsort; what the
    missing low bits leave unordered is corrected by a sort of nearly sorted keys.
    """
    row_bits = max(1, (len(keys) - 1).bit_length())
    packed = (keys >> np.uint64(row_bits)) << np.uint64(row_bits)
    packed |= np.arange(len(keys), dtype=np.uint64)
    packed.sort()
    packed &= np.uint64((1 << row_bits) - 1)
    order = packed.view(np.int64)
    ordered = keys[order]
    if np.any(ordered[1:] < ordered[:-1]):
        order = order[np.argsort(ordered, kind="stable")]
    return order


def mixed(values: NDArray[Any]) -> Keys:
    """A bijection of 64-bit integers that spreads them evenly: the finalizer of splitmix64 (Steele et al., 2014)."""
    keys = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return keys ^ (keys >> np.uint64(31))


def combined(columns: NDArray[Any], seed: int = 0) -> Keys:
    """A 64-bit hash of each row of integers [R, C]; two different rows have the same hash with probability 2**-64."""
    keys = np.full(len(columns), seed & _MASK_64, np.uint64)
    for column in columns.T:
        keys = mixed(keys ^ mixed(column))
    return keys


def first_of_equal(blocks: Iterator[Block]) -> Iterator[tuple[Keys, NDArray[Any], NDArray[Any]]]:
    """For sorted blocks: keys, values, and for each row the value of the first row with this key, over block borders."""
    last_key: np.uint64 | None = None
    last_first: Any = None
    for keys, values in blocks:
        if not len(keys):
            continue
        starts = np.empty(len(keys), bool)
        starts[0] = last_key is None or keys[0] != last_key
        np.not_equal(keys[1:], keys[:-1], out=starts[1:])
        source = np.where(starts, np.arange(len(keys)), -1)
        np.maximum.accumulate(source, out=source)
        firsts = values[source]
        if not starts[0]:
            firsts[source < 0] = last_first
        last_key, last_first = keys[-1], firsts[-1]
        yield keys, values, firsts


def whole_buckets(blocks: Iterator[Block]) -> Iterator[Block]:
    """The same rows in blocks that never separate rows with equal keys; a block holds at least one whole bucket."""
    kept: list[Block] = []
    for keys, values in blocks:
        if not len(keys):
            continue
        border = int(np.searchsorted(keys, keys[-1], side="left"))
        if border or (kept and kept[-1][0][-1] != keys[0]):
            # Rows before `border`, and the kept rows, are complete unless the last key began in an earlier block.
            done = [*kept, (keys[:border], values[:border])]
            yield np.concatenate([block[0] for block in done]), np.concatenate([block[1] for block in done])
            kept = []
        kept.append((keys[border:], values[border:]))
    if kept:
        yield np.concatenate([block[0] for block in kept]), np.concatenate([block[1] for block in kept])


def pairs_in_buckets(keys: Keys, window: int | None = None) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Pairs of rows (i, j), i < j, of sorted keys that are equal; with a window, only j - i <= window."""
    first = np.flatnonzero(keys[1:] == keys[:-1])
    distance = 1
    while len(first) and (window is None or distance <= window):
        yield first, first + distance
        distance += 1
        first = first[first + distance < len(keys)]
        first = first[keys[first] == keys[first + distance]]
