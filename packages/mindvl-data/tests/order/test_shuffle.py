# SPDX-License-Identifier: Apache-2.0
"""Shuffle: a permutation, the same from anywhere, near in shards."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mindvl_data.order.shuffle import EpochOrder, permute


def order(sizes: list[int], *, window: int = 8, seed: int = 0, epoch: int = 0) -> EpochOrder:
    return EpochOrder(sizes, window=window, seed=seed, source="s", epoch=epoch)


def pairs(epoch_order: EpochOrder, start: int, stop: int) -> list[tuple[int, int]]:
    shards, packs = epoch_order.positions(start, stop)
    return list(zip(shards.tolist(), packs.tolist(), strict=True))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_permute_is_a_permutation(size: int, key: int) -> None:
    assert sorted(permute(np.arange(size, dtype=np.uint64), size, key).tolist()) == list(range(size))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=10), st.integers(1, 50), st.integers(0, 100))
def test_an_epoch_holds_every_sample_once_and_can_be_entered_anywhere(sizes: list[int], window: int, at: int) -> None:
    epoch_order = order(sizes, window=window)
    everything = pairs(epoch_order, 0, sum(sizes))
    assert sorted(everything) == [(s, r) for s, size in enumerate(sizes) for r in range(size)]
    start = at % sum(sizes)
    assert pairs(epoch_order, start, sum(sizes)) == everything[start:]


def test_seed_and_epoch_change_the_order() -> None:
    first = pairs(order([50, 50]), 0, 100)
    assert first != pairs(order([50, 50], epoch=1), 0, 100)
    assert first != pairs(order([50, 50], seed=1), 0, 100)
    assert first == pairs(order([50, 50]), 0, 100)


def test_neighbours_lie_in_few_shards() -> None:
    nearby = pairs(order([100] * 50, window=200), 1000, 1200)
    assert len({shard for shard, _ in nearby}) <= 3


def test_a_long_window_is_well_mixed() -> None:
    values = permute(np.arange(10_000, dtype=np.uint64), 10_000, 7)
    assert abs(np.corrcoef(np.arange(10_000), values)[0, 1]) < 0.05
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.05
