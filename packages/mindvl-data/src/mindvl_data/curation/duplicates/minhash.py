# SPDX-License-Identifier: Apache-2.0
"""The step `text_duplicates`: texts whose sets of shingles are similar, by MinHash and locality-sensitive hashing.

Comes after exact_duplicates. A signature holds the hash values of datasketch's MinHash. Two records become candidates if
one band of their signatures is equal; a candidate is confirmed if the estimated Jaccard similarity, the share of equal hash
values, reaches the threshold. Defaults: shingles of 5 words, 14 bands of 8 values, similarity 0.75, as FineWeb (Penedo
et al., 2024). The standard error of an estimate at 0.75 from 112 values is 0.04.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mindvl_data.curation.duplicates.exact import MIB, check_memory_mib
from mindvl_data.curation.duplicates.groups import Groups, RecordTable, Rows, decisions, preference
from mindvl_data.curation.duplicates.sorting import (
    SortedRuns,
    combined,
    first_of_equal,
    pairs_in_buckets,
    whole_buckets,
)
from mindvl_data.curation.extras import require
from mindvl_data.curation.normal_text import normalized, shingles, tokens
from mindvl_data.curation.record import Record
from mindvl_data.curation.step import Context, Decision, Signatures, Step, register

WINDOW = 64  # records after a record in a bucket with which it is compared; all of them in buckets of up to 65
PREFERENCE_BYTES = 8
_PAIRS_AT_ONCE = 1 << 16  # bounds the signatures that are compared at a time


@dataclass(frozen=True, kw_only=True)
class TextDuplicates:
    """Parameters of `text_duplicates`.

    Attributes:
        unit: Shingles of words (Chinese and other scripts without spaces: of characters), or of characters of the
            normalized text, which suit captions of a few words.
        shingle_size: Words or characters of a shingle.
        num_bands, rows_per_band: Number of bands of a signature, and of hash values in a band.
        threshold: Minimum estimated Jaccard similarity of duplicates.
        keep: Fact whose greatest value selects the record to keep; by default the first record in input order is kept.
        memory_mib: Memory for sorting, in MiB.
    """

    unit: Literal["words", "characters"] = "words"
    shingle_size: int = 5
    num_bands: int = 14
    rows_per_band: int = 8
    threshold: float = 0.75
    keep: str = ""
    memory_mib: int = 1024

    def __post_init__(self) -> None:
        check_memory_mib(self.memory_mib)
        for name in ("shingle_size", "num_bands", "rows_per_band"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, got {getattr(self, name)}.")
        if not 0 < self.threshold <= 1:
            raise ValueError(f"threshold: must be greater than 0 and at most 1, got {self.threshold}.")

    @property
    def num_values(self) -> int:
        """Hash values of a signature."""
        return self.num_bands * self.rows_per_band


def text_shingles(text: str, unit: str, size: int) -> list[str]:
    """The set of shingles of a text."""
    if unit == "words":
        return shingles(tokens(text), size)
    characters = normalized(text)
    count = max(1, len(characters) - size + 1) if characters else 0
    return list(dict.fromkeys(characters[start : start + size] for start in range(count)))


def sign(records: list[Record], config: TextDuplicates, context: Context) -> Sequence[NDArray[np.uint8]]:
    """One signature for each record with text: hash values as uint32, and the preference."""
    datasketch = require("datasketch", extra="curation", where="steps: text_duplicates")
    empty = context.resource(
        ("minhash", config.num_values), partial(datasketch.MinHash, config.num_values, seed=1, scheme="affine32")
    )
    found = []
    for record in records:
        parts = text_shingles(record.text(), config.unit, config.shingle_size)
        rows = np.empty((1 if parts else 0, 4 * config.num_values + PREFERENCE_BYTES), np.uint8)
        if parts:
            minhash = empty.copy()
            minhash.update_batch([part.encode() for part in parts])
            rows[0, :-PREFERENCE_BYTES] = minhash.hashvalues.astype("<u4").view(np.uint8)
            rows[0, -PREFERENCE_BYTES:] = np.array([preference(record, config.keep)], "<f8").view(np.uint8)
        found.append(rows)
    return found


def decide(signatures: Signatures, config: TextDuplicates, context: Context, directory: Path) -> Iterable[Decision]:
    """Join records with equal signatures, then confirmed candidates, and keep one of each group."""
    table = RecordTable(signatures, directory / "records")
    groups = Groups(table.num_records)
    is_representative = _join_equal(table, groups, directory, config)
    pairs, is_in_pair = _candidate_pairs(table, is_representative, directory, config)
    store = _SignatureStore(table, is_in_pair, directory / "signatures.bin", config.num_values)
    for keys, _ in pairs.merged():
        for start in range(0, len(keys), _PAIRS_AT_ONCE):
            unique = np.unique(keys[start : start + _PAIRS_AT_ONCE])
            first, second = (unique >> np.uint64(32)).astype(np.uint32), unique.astype(np.uint32)
            is_open = groups.roots(first) != groups.roots(second)
            first, second = first[is_open], second[is_open]
            similar = store.similarity(first, second) >= config.threshold
            groups.join(first[similar], second[similar])
    preferences = ((records, preferred) for records, _, preferred in _rows(table))
    return decisions(groups, table, preferences, reason="text_duplicate")


def _join_equal(table: RecordTable, groups: Groups, directory: Path, config: TextDuplicates) -> NDArray[np.bool_]:
    """Join records with equal signatures (one sort); returns for each record whether it represents its equals."""
    is_representative = np.ones(table.num_records, bool)
    runs = SortedRuns(directory / "equal", np.uint32, memory_bytes=config.memory_mib * MIB)
    for records, values, _ in _rows(table):
        runs.add(combined(values), records)
    for _, records, firsts in first_of_equal(runs.merged()):
        groups.join(firsts, records)
        is_representative[records[records != firsts]] = False
    return is_representative


def _candidate_pairs(
    table: RecordTable, is_representative: NDArray[np.bool_], directory: Path, config: TextDuplicates
) -> tuple[SortedRuns, NDArray[np.bool_]]:
    """Pairs of representatives with an equal band, as keys `first << 32 | second` that may repeat, and whether each record
    is in a pair."""
    memory_bytes = config.memory_mib * MIB // 2
    bands = SortedRuns(directory / "bands", np.uint32, memory_bytes=memory_bytes)
    for records, values, _ in _rows(table):
        chosen = is_representative[records]
        for band in range(config.num_bands):
            columns = values[chosen, band * config.rows_per_band : (band + 1) * config.rows_per_band]
            bands.add(combined(columns, seed=band + 1), records[chosen])
    is_in_pair = np.zeros(table.num_records, bool)
    pairs = SortedRuns(directory / "pairs", np.uint8, memory_bytes=memory_bytes)
    for keys, records in whole_buckets(bands.merged()):
        for first, second in pairs_in_buckets(keys, WINDOW):
            low, high = records[first], records[second]
            is_in_pair[low] = is_in_pair[high] = True
            pairs.add(low.astype(np.uint64) << np.uint64(32) | high, np.zeros(len(low), np.uint8))
    return pairs, is_in_pair


class _SignatureStore:
    """Hash values of the records that are in a pair, in a file that is read at random; 4 bytes of memory per record."""

    def __init__(self, table: RecordTable, is_in_pair: NDArray[np.bool_], path: Path, num_values: int) -> None:
        self._places = np.cumsum(is_in_pair, dtype=np.uint32)
        with open(path, "wb") as file:
            for records, values, _ in _rows(table):
                values[is_in_pair[records]].tofile(file)
        num_rows = int(self._places[-1]) if len(self._places) else 0
        self._values: NDArray[np.uint32] = (
            np.memmap(path, np.uint32, "r", shape=(num_rows, num_values))
            if num_rows
            else np.empty((0, num_values), np.uint32)
        )

    def similarity(self, first: Rows, second: Rows) -> NDArray[np.float64]:
        """The share of equal hash values of each pair."""
        equal = self._values[self._places[first] - 1] == self._values[self._places[second] - 1]
        return equal.mean(axis=1) if len(equal) else np.empty(0)


def _rows(table: RecordTable) -> Iterator[tuple[Rows, NDArray[np.uint32], NDArray[Any]]]:
    """Records, hash values [R, num_values], preferences [R]."""
    for records, signatures in table.blocks():
        values = np.ascontiguousarray(signatures[:, :-PREFERENCE_BYTES]).view("<u4")
        yield records, values, np.ascontiguousarray(signatures[:, -PREFERENCE_BYTES:]).view("<f8")[:, 0]


STEP = register(
    Step(
        name="text_duplicates",
        config=TextDuplicates,
        summary="Keep one of the records whose texts share most of their shingles, estimated by MinHash.",
        section="B.1.1",
        needs=("text",),
        gives=("duplicate_group", "num_duplicates"),
        reasons={"text_duplicate": "An earlier or better record has a text of similar shingles."},
        sign=sign,
        decide=decide,
    )
)
