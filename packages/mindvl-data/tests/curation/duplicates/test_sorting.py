# SPDX-License-Identifier: Apache-2.0
"""External sorting against Python's sort, with runs of a few rows and many equal keys."""

import itertools
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindvl_data.curation.duplicates import sorting
from mindvl_data.curation.duplicates.sorting import (
    SortedRuns,
    combined,
    first_of_equal,
    mixed,
    pairs_in_buckets,
    stable_order,
    whole_buckets,
)

QUIET = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # processors of CI are shared

KEYS = st.lists(st.one_of(st.integers(0, 5), st.integers(0, 2**64 - 1)), max_size=60)


@pytest.fixture(autouse=True)
def _tiny_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sorting, "_MIN_BLOCK_ROWS", 3)


def _merged(keys: list[int], directory: Path, *, memory_bytes: int) -> SortedRuns:
    runs = SortedRuns(directory, np.uint32, memory_bytes=memory_bytes)
    for start in range(0, len(keys), 5):
        part = np.array(keys[start : start + 5], np.uint64)
        runs.add(part, np.arange(start, start + len(part), dtype=np.uint32))
    return runs


@QUIET
@given(KEYS, st.sampled_from([1, 600, 1 << 20]))
def test_rows_come_out_as_a_stable_sort_orders_them(keys: list[int], memory_bytes: int) -> None:
    with TemporaryDirectory() as directory:
        blocks = list(_merged(keys, Path(directory), memory_bytes=memory_bytes).merged())
        found = [(int(key), int(row)) for part in blocks for key, row in zip(*part, strict=True)]
    assert found == sorted((key, row) for row, key in enumerate(keys))


def test_runs_are_written_only_when_memory_is_short_and_removed_after_merging(tmp_path: Path) -> None:
    keys = list(range(40, 0, -1))
    large = _merged(keys, tmp_path / "large", memory_bytes=1 << 20)
    small = _merged(keys, tmp_path / "small", memory_bytes=1)
    assert (large.num_runs, small.num_runs) == (0, 13)
    assert [int(key) for part in small.merged() for key in part[0]] == sorted(keys)
    assert list((tmp_path / "small").iterdir()) == []


@QUIET
@given(KEYS)
def test_the_order_is_that_of_a_stable_argsort(keys: list[int]) -> None:
    array = np.array(keys, np.uint64)
    assert stable_order(array).tolist() == np.argsort(array, kind="stable").tolist()


@QUIET
@given(KEYS, st.integers(1, 7))
def test_each_row_gets_the_first_row_with_its_key(keys: list[int], block_rows: int) -> None:
    ordered = sorted(keys)
    blocks = [
        (np.array(ordered[start : start + block_rows], np.uint64), np.arange(start, len(ordered))[:block_rows])
        for start in range(0, len(ordered), block_rows)
    ]
    found = [int(first) for _, _, firsts in first_of_equal(iter(blocks)) for first in firsts]
    assert found == [ordered.index(key) for key in ordered]


@QUIET
@given(KEYS, st.integers(1, 7))
def test_blocks_are_regrouped_into_whole_buckets(keys: list[int], block_rows: int) -> None:
    ordered = np.array(sorted(keys), np.uint64)
    blocks = [
        (ordered[start : start + block_rows], np.arange(start, len(ordered))[:block_rows])
        for start in range(0, len(ordered), block_rows)
    ]
    found = list(whole_buckets(iter(blocks)))
    assert [int(row) for part in found for row in part[1]] == list(range(len(ordered)))
    for before, after in itertools.pairwise(found):
        assert before[0][-1] < after[0][0]


@pytest.mark.slow
@QUIET
@given(st.lists(st.integers(0, 4), max_size=20), st.sampled_from([None, 1, 2]))
def test_pairs_are_all_pairs_of_equal_keys_within_the_window(keys: list[int], window: int | None) -> None:
    ordered = sorted(keys)
    found = {
        (int(i), int(j))
        for first, second in pairs_in_buckets(np.array(ordered, np.uint64), window)
        for i, j in zip(first, second, strict=True)
    }
    limit = len(ordered) if window is None else window
    assert found == {
        (i, j)
        for i in range(len(ordered))
        for j in range(i + 1, len(ordered))
        if ordered[i] == ordered[j] and j - i <= limit
    }


def test_mixing_follows_splitmix64() -> None:
    # The first outputs of splitmix64 with the seeds 0 and 1, computed by hand with Python's integers.
    def by_hand(seed: int) -> int:
        value = (seed + 0x9E3779B97F4A7C15) % 2**64
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
        return value ^ (value >> 31)

    assert by_hand(0) == 0xE220A8397B1DCDAF  # the published first output
    assert mixed(np.array([0, 1])).tolist() == [by_hand(0), by_hand(1)]


def test_combining_depends_on_every_column_their_order_and_the_seed() -> None:
    rows = np.array([[1, 2, 3], [1, 2, 4], [2, 1, 3], [1, 2, 3]])
    found = combined(rows)
    assert found[0] == found[3]
    assert len({*found.tolist(), *combined(rows, seed=1).tolist()}) == 6
