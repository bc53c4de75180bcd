# SPDX-License-Identifier: Apache-2.0
"""Mixture: shares hold over every prefix, by samples and by tokens."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mindvl_data import DataError
from mindvl_data.order.mixture import Mixture, effective_weights


@example([1.0, 1.0, 4.0, 4.0, 0.25])  # plain largest-deficit is 1.02 samples off after 18 draws
@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=20))
def test_no_source_is_ever_more_than_one_sample_off_its_share(weights: list[float]) -> None:
    mixture = Mixture(weights)
    counts, share = np.zeros(len(weights)), np.array(weights) / sum(weights)
    for drawn in range(1, 300):
        source = mixture.next_source()
        assert source is not None
        mixture.took(source)
        counts[source] += 1
        assert np.abs(counts - share * drawn).max() < 1


@settings(max_examples=10, deadline=None)
@given(st.integers(100, 320), st.integers(0, 2**32 - 1))
def test_hundreds_of_sources_keep_their_shares_also_when_some_end(num_sources: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    weights = np.exp(generator.normal(0, 2, num_sources))
    mixture = Mixture(weights.tolist())
    active = np.ones(num_sources, np.bool_)
    target, counts = np.zeros(num_sources), np.zeros(num_sources)
    for drawn in range(1, 1500):
        if drawn >= 500 and drawn % 25 == 0:
            ended = int(generator.choice(np.flatnonzero(active)))
            mixture.exhaust(ended)
            active[ended] = False
            # What it was still owed, or had too much of, is shared by the sources that continue.
            target += np.where(active, weights, 0) / weights[active].sum() * (target - counts)[ended]
            target[ended] = counts[ended]
        source = mixture.next_source()
        assert source is not None
        mixture.took(source)
        counts[source] += 1
        target += np.where(active, weights, 0) / weights[active].sum()
        assert np.abs(counts - target).max() < (1 if active.all() else 1.3)
    assert np.allclose(mixture.owed, target - counts, atol=1e-9)


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 40), st.integers(0, 2**32 - 1))
def test_by_tokens_no_source_is_further_off_than_two_of_the_largest_samples(num_sources: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    weights, means = generator.uniform(0.1, 3, num_sources), generator.uniform(50, 2000, num_sources)
    share = weights / weights.sum()
    mixture = Mixture(weights.tolist(), unit=1 / float((share / means).sum()))
    tokens = np.zeros(num_sources)
    for _ in range(1500):
        source = mixture.next_source()
        assert source is not None
        amount = float(means[source] * generator.uniform(0.1, 1.9))
        mixture.took(source, amount)
        tokens[source] += amount
        assert np.abs(tokens - share * tokens.sum()).max() <= 2 * 1.9 * means.max()


def test_weights_can_count_tokens() -> None:
    mixture = Mixture([1, 1], unit=50)
    tokens = [0, 0]
    for _ in range(500):
        source = mixture.next_source()
        assert source is not None
        amount = (10, 90)[source]
        mixture.took(source, amount)
        tokens[source] += amount
    assert abs(tokens[0] - tokens[1]) <= 100


def test_when_a_source_is_exhausted_the_others_keep_their_proportions() -> None:
    mixture = Mixture([6, 3, 1])
    mixture.exhaust(0)
    counts = [0, 0, 0]
    for _ in range(400):
        source = mixture.next_source()
        assert source is not None
        mixture.took(source)
        counts[source] += 1
    assert counts == [0, 300, 100]
    mixture.exhaust(1)
    mixture.exhaust(2)
    assert mixture.next_source() is None


def test_a_text_share_scales_text_sources_together() -> None:
    weights = effective_weights([1, 3, 4], [True, True, False], 0.2)
    assert weights == pytest.approx([0.05, 0.15, 0.8])
    assert effective_weights([1, 3], [True, False], None) == [0.25, 0.75]


def test_a_text_share_that_no_source_can_give_is_refused() -> None:
    with pytest.raises(DataError, match="no source is text-only"):
        effective_weights([1], [False], 0.2)
    with pytest.raises(DataError, match="all sources are text-only"):
        effective_weights([1], [True], 0.2)
