# SPDX-License-Identifier: Apache-2.0
"""Pairs of duplicates -> groups -> decisions: one record of each group is kept, the others are dropped.

Comes after the search for pairs in the steps of this directory. Memory: 4 bytes for each record (400 MB for 100 million),
and about 40 bytes for each record that is in a group; record numbers stay on disk.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindvl_data.curation.record import Record
from mindvl_data.curation.step import Decision, Drop, Signatures
from mindvl_data.errors import DataError

Rows = NDArray[np.uint32]

_MAX_RECORDS = 1 << 32
_CHUNK = 1 << 20


class Groups:
    """Connected components of records 0 to `num_records` - 1; the root of a component is its lowest record."""

    def __init__(self, num_records: int) -> None:
        self._parents = np.arange(num_records, dtype=np.uint32)

    def join(self, first: NDArray[Any], second: NDArray[Any]) -> None:
        """Join the groups of first[i] and second[i] for every i."""
        first, second = self.roots(first), self.roots(second)
        while len(first):
            low, high = np.minimum(first, second), np.maximum(first, second)
            different = low != high
            low, high = low[different], high[different]
            # Of several pairs with the same `high` one is stored; the others are joined in the next round.
            self._parents[high] = low
            first, second = self.roots(low), self.roots(high)

    def roots(self, records: NDArray[Any]) -> Rows:
        """The root of each record."""
        found = self._parents[records]
        while True:
            above = self._parents[found]
            if np.array_equal(above, found):
                break
            found = above
        self._parents[records] = found
        return found

    def members(self) -> tuple[Rows, Rows]:
        """The records that are in a group of at least two, ascending, and their roots."""
        found: list[Rows] = [np.empty(0, np.uint32)]
        for start in range(0, len(self._parents), _CHUNK):
            records = np.arange(start, min(start + _CHUNK, len(self._parents)), dtype=np.uint32)
            found.append(records[self.roots(records) != records])
        others = np.concatenate(found)
        records = np.union1d(others, self._parents[others]).astype(np.uint32)
        return records, self._parents[records]


class RecordTable:
    """The records of a set step in input order: a dense index for each, and their numbers on disk.

    Args:
        signatures: The signatures of the step; those of one record follow each other.
        directory: Directory for the files.
    """

    def __init__(self, signatures: Signatures, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._signatures = signatures
        self._paths = directory / "numbers.bin", directory / "pieces.bin"
        self.num_records = 0
        with open(self._paths[0], "wb") as numbers_file, open(self._paths[1], "wb") as pieces_file:
            for numbers, pieces, starts, _ in self._runs():
                numbers[starts].astype(np.uint64).tofile(numbers_file)
                pieces[starts].astype(np.uint32).tofile(pieces_file)
                self.num_records += int(starts.sum())
        if self.num_records >= _MAX_RECORDS:
            raise DataError(
                f"steps: {self.num_records:,} records reached one search for duplicates, the limit is {_MAX_RECORDS:,}. "
                "Split the input by source."
            )

    def blocks(self) -> Iterator[tuple[Rows, NDArray[np.uint8]]]:
        """Blocks in input order: index of the record [R], signature [R, width]."""
        before = -1
        for _, _, starts, signatures in self._runs():
            records = before + np.cumsum(starts)
            before = int(records[-1])
            yield records.astype(np.uint32), signatures

    def rows(self, dtype: np.dtype[Any]) -> Iterator[tuple[Rows, NDArray[Any]]]:
        """As `blocks`, with signatures as values [R] of a structured type of their width."""
        for records, signatures in self.blocks():
            yield records, np.ascontiguousarray(signatures).view(dtype)[:, 0]

    def names(self, records: NDArray[Any]) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
        """Number and piece of each record."""
        if not len(records):
            return np.empty(0, np.uint64), np.empty(0, np.uint32)
        numbers = np.memmap(self._paths[0], np.uint64, "r")[records]
        return numbers, np.memmap(self._paths[1], np.uint32, "r")[records]

    def _runs(self) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.uint32], NDArray[np.bool_], NDArray[np.uint8]]]:
        last: tuple[int, int] | None = None
        for numbers, pieces, signatures in self._signatures.blocks():
            if not len(numbers):
                continue
            starts = np.ones(len(numbers), bool)
            starts[1:] = (numbers[1:] != numbers[:-1]) | (pieces[1:] != pieces[:-1])
            starts[0] = last != (int(numbers[0]), int(pieces[0]))
            last = int(numbers[-1]), int(pieces[-1])
            yield numbers, pieces, starts, signatures


def preference(record: Record, fact: str) -> float:
    """The value of the fact that chooses the record to keep; -inf if the record does not have it, 0 without a fact."""
    if not fact:
        return 0.0
    value = record.facts.get(fact)
    is_number = isinstance(value, int | float) and value == value
    return float(value) if is_number and value is not None else float("-inf")


def decisions(
    groups: Groups, table: RecordTable, preferences: Iterator[tuple[Rows, NDArray[Any]]], *, reason: str
) -> Iterator[Decision]:
    """Keep the record with the greatest preference, then the lowest number, of each group, and drop the others.

    Args:
        preferences: Blocks in input order: index of the record, preference; the first of a record counts.
        reason: Reason code of the drops.
    """
    records, roots = groups.members()
    if not len(records):
        return
    values = np.zeros(len(records))
    is_known = np.zeros(len(records), bool)
    for block_records, block_values in preferences:
        places = np.searchsorted(records, block_records)
        found = np.flatnonzero(records[np.minimum(places, len(records) - 1)] == block_records)
        found = found[~is_known[places[found]]]
        places, positions = np.unique(places[found], return_index=True)
        values[places], is_known[places] = block_values[found[positions]], True
    order = np.lexsort((records, -values, roots))
    starts = np.ones(len(records), bool)
    starts[1:] = roots[order][1:] != roots[order][:-1]
    group = np.cumsum(starts) - 1
    kept = records[order][starts][group]
    sizes = np.bincount(group)[group]
    by_record = np.argsort(records[order], kind="stable")
    for start in range(0, len(records), _CHUNK):
        part = by_record[start : start + _CHUNK]
        numbers, pieces = table.names(records[order][part])
        kept_numbers, kept_pieces = table.names(kept[part])
        is_kept = records[order][part] == kept[part]
        rows = zip(numbers, pieces, kept_numbers, kept_pieces, is_kept, sizes[part], strict=True)
        for number, piece, kept_number, kept_piece, keeps, size in rows:
            yield _decision(
                int(number), int(piece), (int(kept_number), int(kept_piece)), bool(keeps), int(size), reason
            )


def _decision(number: int, piece: int, kept: tuple[int, int], keeps: bool, size: int, reason: str) -> Decision:
    name = record_name(*kept)
    if keeps:
        return Decision(number, piece, facts={"duplicate_group": name, "num_duplicates": size - 1})
    return Decision(number, piece, Drop(reason, f"same as {name}", {"duplicate_group": name}))


def record_name(number: int, piece: int) -> str:
    """How decisions name another record: `PART:POSITION`, and `.PIECE` for further records made from it."""
    return f"{number >> 32}:{number & 0xFFFFFFFF}" + (f".{piece}" if piece else "")
