# SPDX-License-Identifier: Apache-2.0
"""Packing: nothing lost, nothing split, both budgets kept, rows nearly full."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mindvl_data import Packer
from mindvl_data.plan.packing import largest_sum


def pack_all(samples: list[tuple[int, int]], capacity: int, max_patches: int, buffer_size: int) -> list[list[int]]:
    density = sum(p for _, p in samples) / max(1, sum(length for length, _ in samples))
    packer: Packer[int] = Packer(
        capacity=capacity, max_patches=max_patches, patches_per_token=density, buffer_size=buffer_size
    )
    rows = []
    for number, (length, patches) in enumerate(samples):
        packer.add(number, length, patches)
        if packer.is_full:
            rows.append(packer.next_row())
    while row := packer.next_row():
        rows.append(row)
    return rows


samples_strategy = st.lists(st.tuples(st.integers(1, 64), st.integers(0, 40)), min_size=1, max_size=120)


@settings(max_examples=150, deadline=None)
@given(samples_strategy, st.integers(1, 32))
def test_rows_keep_both_budgets_and_hold_each_sample_once(samples: list[tuple[int, int]], buffer_size: int) -> None:
    rows = pack_all(samples, 64, 40, buffer_size)
    assert sorted(itertools.chain(*rows)) == list(range(len(samples)))
    for row in rows:
        assert sum(samples[i][0] for i in row) <= 64
        assert sum(samples[i][1] for i in row) <= 40


@settings(max_examples=50, deadline=None)
@given(samples_strategy)
def test_the_same_input_gives_the_same_rows(samples: list[tuple[int, int]]) -> None:
    assert pack_all(samples, 64, 40, 16) == pack_all(samples, 64, 40, 16)


def test_lengths_6_6_3_6_in_rows_of_10() -> None:
    rows = pack_all([(6, 0), (6, 0), (3, 0), (6, 0)], 10, 0, 4)
    assert [[(6, 6, 3, 6)[i] for i in row] for row in rows] == [[6, 3], [6], [6]]
    assert sorted(itertools.chain(*rows)) == [0, 1, 2, 3]


def test_the_oldest_sample_is_in_the_next_row() -> None:
    packer: Packer[int] = Packer(capacity=100, max_patches=10, patches_per_token=0.0, buffer_size=8)
    for number, length in enumerate([51, 50, 50, 25, 25, 49, 10, 90]):
        packer.add(number, length, 0)
    while packer.items:
        oldest = packer.items[0]
        assert oldest in packer.next_row()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.integers(1, 120))
def test_largest_sum_is_the_best_of_all_subsets(lengths: list[int], limit: int) -> None:
    every = (sum(c) for size in range(len(lengths) + 1) for c in itertools.combinations(lengths, size))
    chosen = largest_sum(lengths, limit)
    assert len(set(chosen)) == len(chosen)
    assert sum(lengths[i] for i in chosen) == max(total for total in every if total <= limit)


def test_rows_are_nearly_full_and_even_in_patches() -> None:
    generator = np.random.default_rng(1)
    lengths = np.clip(np.exp(generator.normal(5.5, 0.9, 4000)), 20, 2048).astype(int)
    patches = (lengths * generator.choice([0.0, 0.6, 0.8], 4000)).astype(int)
    limit = max(int(1.25 * patches.sum() / lengths.sum() * 2048), int(patches.max()))
    rows = pack_all(list(zip(lengths.tolist(), patches.tolist(), strict=True)), 2048, limit, 256)[:-20]
    fill = [sum(int(lengths[i]) for i in row) / 2048 for row in rows]
    assert np.mean(fill) > 0.995
