# SPDX-License-Identifier: Apache-2.0
"""Packing: nothing lost, nothing split, both budgets kept, packs nearly full."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindvl_data import Packer
from mindvl_data.order.packing import largest_sum


def pack_all(samples: list[tuple[int, int]], capacity: int, max_patches: int, buffer_size: int) -> list[list[int]]:
    density = sum(p for _, p in samples) / max(1, sum(length for length, _ in samples))
    packer: Packer[int] = Packer(
        capacity=capacity, max_patches=max_patches, patches_per_token=density, buffer_size=buffer_size
    )
    packs = []
    for number, (length, patches) in enumerate(samples):
        packer.add(number, length, patches)
        if packer.is_full:
            packs.append(packer.next_pack())
    while pack := packer.next_pack():
        packs.append(pack)
    return packs


samples_strategy = st.lists(st.tuples(st.integers(1, 64), st.integers(0, 40)), min_size=1, max_size=120)


@settings(max_examples=150, deadline=None)
@given(samples_strategy, st.integers(1, 32))
def test_packs_keep_both_budgets_and_hold_each_sample_once(samples: list[tuple[int, int]], buffer_size: int) -> None:
    packs = pack_all(samples, 64, 40, buffer_size)
    assert sorted(itertools.chain(*packs)) == list(range(len(samples)))
    for pack in packs:
        assert sum(samples[i][0] for i in pack) <= 64
        assert sum(samples[i][1] for i in pack) <= 40


@settings(max_examples=100, deadline=None)
@given(samples_strategy)
def test_a_sample_above_the_patches_of_a_pack_stands_among_text_alone(samples: list[tuple[int, int]]) -> None:
    packs = pack_all(samples, 64, 15, 16)
    assert sorted(itertools.chain(*packs)) == list(range(len(samples)))
    for pack in packs:
        patches = [samples[i][1] for i in pack if samples[i][1]]
        assert sum(patches) <= 15 or len(patches) == 1


@settings(max_examples=50, deadline=None)
@given(samples_strategy)
def test_the_same_input_gives_the_same_packs(samples: list[tuple[int, int]]) -> None:
    assert pack_all(samples, 64, 40, 16) == pack_all(samples, 64, 40, 16)


def test_text_fills_the_pack_of_a_sample_above_its_patches() -> None:
    assert pack_all([(6, 20), (3, 1), (4, 0), (7, 1)], 10, 10, 8) == [[0, 2], [1, 3]]


def test_lengths_6_6_3_6_in_packs_of_10() -> None:
    packs = pack_all([(6, 0), (6, 0), (3, 0), (6, 0)], 10, 0, 4)
    assert [[(6, 6, 3, 6)[i] for i in pack] for pack in packs] == [[6, 3], [6], [6]]
    assert sorted(itertools.chain(*packs)) == [0, 1, 2, 3]


def test_the_oldest_sample_is_in_the_next_pack() -> None:
    packer: Packer[int] = Packer(capacity=100, max_patches=10, patches_per_token=0.0, buffer_size=8)
    for number, length in enumerate([51, 50, 50, 25, 25, 49, 10, 90]):
        packer.add(number, length, 0)
    while packer.items:
        oldest = packer.items[0]
        assert oldest in packer.next_pack()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.integers(1, 120))
def test_largest_sum_is_the_best_of_all_subsets(lengths: list[int], limit: int) -> None:
    every = (sum(c) for size in range(len(lengths) + 1) for c in itertools.combinations(lengths, size))
    chosen = largest_sum(lengths, limit)
    assert len(set(chosen)) == len(chosen)
    assert sum(lengths[i] for i in chosen) == max(total for total in every if total <= limit)


def test_a_sample_that_fits_no_pack_and_a_full_buffer_are_refused() -> None:
    packer: Packer[str] = Packer(capacity=10, max_patches=4, patches_per_token=0.1, buffer_size=1)
    for length, patches in ((11, 0), (0, 0), (5, -1)):
        with pytest.raises(
            ValueError, match=f"sample 'a' of {length} tokens and {patches} patches does not fit into a"
        ):
            packer.add("a", length, patches)
    packer.add("a", 10, 4)
    with pytest.raises(ValueError, match="the buffer of 1 samples is full at sample 'b'"):
        packer.add("b", 1, 0)


def test_a_large_buffer_begins_small_and_grows_to_its_size() -> None:
    packer: Packer[int] = Packer(capacity=10, max_patches=0, patches_per_token=0.0, buffer_size=256)
    sizes = []
    for number in range(4000):
        packer.add(number, 10, 0)
        if packer.is_full:
            sizes.append(len(packer.items))
            assert packer.next_pack() == [number - sizes[-1] + 1]
    assert sizes[:16] == [64] * 16
    assert max(sizes) == sizes[-1] == 256
    assert sizes == sorted(sizes)
    again: Packer[int] = Packer(capacity=10, max_patches=0, patches_per_token=0.0, buffer_size=256)
    again.num_packs = 160
    for number in range(74):
        assert not again.is_full
        again.add(number, 10, 0)
    assert again.is_full


def workload(count: int, capacity: int, seed: int) -> list[tuple[int, int]]:
    """(tokens, patches): captions, pages of text, charts and plain text in the shares 40, 15, 25 and 20."""
    generator = np.random.default_rng(seed)
    kind = generator.choice(4, count, p=[0.40, 0.15, 0.25, 0.20])
    lengths = np.choose(
        kind,
        [
            generator.integers(100, 401, count),
            np.exp(generator.uniform(np.log(1000), np.log(4000), count)),
            generator.integers(500, 1501, count),
            np.clip(900 * np.exp(generator.normal(0, 0.9, count)), 200, 8192),
        ],
    )
    visual = np.choose(kind, [generator.uniform(low, high, count) for low, high in VISUAL])
    tokens = np.minimum(lengths.astype(int), capacity)
    return list(zip(tokens.tolist(), (4 * (tokens * visual).astype(int)).tolist(), strict=True))


VISUAL = ((0.45, 0.80), (0.55, 0.85), (0.50, 0.85), (0.0, 0.0))


@pytest.mark.parametrize(("capacity", "least_fill"), [(8192, 0.999), (4096, 0.997), (2048, 0.993)])
def test_packs_of_a_mixture_are_nearly_full_and_nothing_waits_long(capacity: int, least_fill: float) -> None:
    samples = workload(9_000, capacity, seed=4)
    density = sum(p for _, p in samples) / sum(length for length, _ in samples)
    limit = max(int(1.25 * density * capacity), max(p for _, p in samples))
    packer: Packer[int] = Packer(capacity=capacity, max_patches=limit, patches_per_token=density, buffer_size=256)
    packs, read, waits = [], [0] * len(samples), []
    for number, (length, patches) in enumerate(samples):
        read[number] = len(packs)
        packer.add(number, length, patches)
        if packer.is_full:
            packs.append(packer.next_pack())
            waits += [len(packs) - 1 - read[i] for i in packs[-1]]
    fill = [sum(samples[i][0] for i in pack) / capacity for pack in packs]
    patches_by_pack = np.array([sum(samples[i][1] for i in pack) for pack in packs])
    assert np.mean(fill) >= least_fill
    assert patches_by_pack.max() <= limit
    assert max(waits) < 256
    if capacity == 8192:
        assert patches_by_pack.max() / patches_by_pack.mean() <= 1.26
        counts = np.array([len(pack) for pack in packs])[: len(packs) // 32 * 32]
        drift = counts.reshape(-1, 32).mean(axis=1).var(ddof=1) / (counts.var(ddof=1) / 32)
        assert drift <= 1.3


def first_fit(samples: list[tuple[int, int]], capacity: int, limit: int) -> float:
    """Packing efficiency of first fit with the patch limit and any number of open packs."""
    free: list[tuple[int, int]] = []
    for length, patches in samples:
        fits = (number for number, (room, left) in enumerate(free) if room >= length and left >= patches)
        number = next(fits, len(free))
        room, left = free[number] if number < len(free) else (capacity, limit)
        free[number : number + 1] = [(room - length, left - patches)]
    return 1 - sum(room for room, _ in free) / (capacity * len(free))


@pytest.mark.parametrize(("tightness", "least_fill"), [(1.15, 0.998), (1.10, 0.997), (1.05, 0.98), (1.00, 0.94)])
def test_packs_are_fuller_than_those_of_first_fit_where_the_patch_limit_binds(
    tightness: float, least_fill: float
) -> None:
    samples = [sample for sample in workload(4_000, 8192, seed=4) if sample[0] < 6_000]
    density = sum(p for _, p in samples) / sum(length for length, _ in samples)
    limit = int(tightness * density * 8192)
    packer: Packer[int] = Packer(capacity=8192, max_patches=limit, patches_per_token=density, buffer_size=256)
    fill = []
    for number, (length, patches) in enumerate(samples):
        packer.add(number, length, patches)
        if packer.is_full:
            pack = packer.next_pack()
            assert sum(samples[i][1] for i in pack) <= limit
            fill.append(sum(samples[i][0] for i in pack) / 8192)
    assert np.mean(fill) > max(least_fill, first_fit(samples, 8192, limit))


def test_a_patch_limit_out_of_reach_does_not_change_the_packs() -> None:
    samples = workload(1_500, 8192, seed=5)
    total = sum(p for _, p in samples)
    assert pack_all(samples, 8192, 4 * 8192, 256) == pack_all(samples, 8192, total, 256)
