# SPDX-License-Identifier: Apache-2.0
"""Completion of a pack within two budgets, compared with all subsets."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mindvl_data.order.completion import best_subset

Samples = list[tuple[int, int]]


def loss(chosen: Samples, tokens: int, limit: int, spare: int) -> float:
    """Lost share of the tokens plus lost share of the patches; infinite above a budget."""
    free_tokens, free_patches = tokens - sum(t for t, _ in chosen), limit - sum(p for _, p in chosen)
    if free_tokens < 0 or free_patches < 0:
        return float("inf")
    return free_tokens / tokens + max(0, free_patches - spare) / max(1, limit)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 30)), max_size=4),
    st.integers(1, 100),
    st.integers(0, 60),
    st.integers(0, 60),
)
def test_the_subset_is_the_best_of_all_with_two_samples_of_each_half(
    samples: Samples, tokens: int, limit: int, spare: int
) -> None:
    lengths, patches = np.array(samples, np.int64).reshape(-1, 2).T
    chosen = best_subset(lengths, patches, tokens=tokens, limit=limit, spare=spare)
    assert len(set(chosen)) == len(chosen)
    halves = [
        [half for size in range(3) for half in itertools.combinations(samples[start::2], size)] for start in (0, 1)
    ]
    least = min(loss([*one, *other], tokens, limit, spare) for one, other in itertools.product(*halves))
    assert abs(loss([samples[number] for number in chosen], tokens, limit, spare) - least) < 1e-9


def test_four_of_many_samples_use_both_budgets_completely() -> None:
    generator = np.random.default_rng(0)
    lengths = generator.integers(300, 1500, 100)
    patches = generator.integers(0, 4 * lengths)
    chosen = best_subset(lengths, patches, tokens=3600, limit=6000, spare=300)
    assert len(chosen) <= 4
    assert 3580 <= lengths[chosen].sum() <= 3600
    assert 5650 <= patches[chosen].sum() <= 6000


def test_nothing_that_fits_gives_an_empty_subset() -> None:
    sizes = np.array([50, 60], np.int64)
    assert best_subset(sizes, sizes, tokens=40, limit=100, spare=0) == []
    assert best_subset(sizes[:0], sizes[:0], tokens=40, limit=100, spare=0) == []
