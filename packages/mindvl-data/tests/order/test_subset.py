# SPDX-License-Identifier: Apache-2.0
"""Subset: the first so many, a stable share of them, without a table of samples."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindvl_data import DataError
from mindvl_data.order.subset import Subset


def used(
    sizes: list[int], *, first: int | None = None, fraction: float | None = None, source: str = "s"
) -> set[tuple[int, int]]:
    subset = Subset(np.array(sizes, np.int64), first=first, fraction=fraction, source=source)
    pairs = [
        (shard, row)
        for shard in range(len(sizes))
        for row in subset.rows(shard, np.arange(subset.sizes[shard])).tolist()
    ]
    assert len(set(pairs)) == len(pairs) == subset.num_samples
    return set(pairs)


def test_first_takes_the_samples_in_the_order_of_the_index() -> None:
    assert used([3, 2, 4], first=4) == {(0, 0), (0, 1), (0, 2), (1, 0)}
    assert used([3, 2], first=99) == {(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.floats(0.05, 1), st.integers(1, 400))
def test_a_fraction_is_exact_to_one_sample_and_taken_from_the_first(
    sizes: list[int], fraction: float, first: int
) -> None:
    offered = min(first, sum(sizes))
    wanted = int(offered * fraction + 0.5)
    if wanted:
        chosen = used(sizes, first=first, fraction=fraction)
        assert len(chosen) == wanted
        assert chosen <= used(sizes, first=first)


def test_a_fraction_is_spread_over_shards_and_samples() -> None:
    chosen = used([1000] * 20, fraction=0.1)
    by_shard = [sorted(row for shard, row in chosen if shard == number) for number in range(20)]
    assert [len(rows) for rows in by_shard] == [100] * 20
    assert len({tuple(rows) for rows in by_shard}) == 20  # not the same rows in every shard
    assert abs(np.mean([row for _, row in chosen]) - 500) < 30


def test_a_larger_fraction_holds_nearly_all_of_a_smaller_one() -> None:
    small, large = used([100] * 10, fraction=0.2), used([100] * 10, fraction=0.5)
    assert len(small - large) <= 10


def test_another_source_chooses_other_samples() -> None:
    assert used([1000], fraction=0.5, source="a") != used([1000], fraction=0.5, source="b")
    assert used([1000], fraction=0.5, source="a") == used([1000], fraction=0.5, source="a")


def test_a_subset_of_nothing_is_refused_by_name() -> None:
    with pytest.raises(DataError, match=r"^source 'tiny': first=None and fraction=0\.001 select none of 30 samples"):
        Subset(np.array([10, 20]), first=None, fraction=0.001, source="tiny")
