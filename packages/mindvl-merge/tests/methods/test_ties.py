# SPDX-License-Identifier: Apache-2.0
"""TIES by hand, and thresholds against a full sort."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindvl_merge.methods import thresholds, ties


def test_signs_are_elected_and_the_mean_is_over_those_that_agree():
    base = np.zeros(4)
    models = [np.array([3.0, -1.0, 0.1, 2.0]), np.array([1.0, 4.0, 0.2, -3.0])]
    # All kept: 3 and 1 agree; -1 + 4 elects plus, so 4 alone; 0.1 and 0.2 agree; 2 - 3 elects minus, so -3 alone.
    assert ties([*models, base], (1.0, 1.0), [0, 0], scale=1.0) == pytest.approx([2.0, 4.0, 0.15, -3.0])
    # With thresholds 2 and 3: 3 | 4 | nothing | 2 - 3 elects minus.
    assert ties([*models, base], (1.0, 1.0), [2.0, 3.0], scale=0.5) == pytest.approx([1.5, 2.0, 0, -1.5])


@given(seed=st.integers(0, 100), density=st.floats(0.01, 1.0), repeated=st.booleans())
def test_the_threshold_is_the_kth_largest_magnitude(seed, density, repeated):
    generator = np.random.default_rng(seed)
    values = generator.standard_normal((3, 200)).astype(np.float32)
    if repeated:
        values = np.round(values)
    pieces = [list(values[:, :90]), list(values[:, 90:])]
    found = thresholds(lambda: iter(pieces), 200, density)
    rank = max(1, int(density * 200))
    for model, threshold in zip(values[:2].astype(np.float64), found, strict=True):
        expected = np.sort(np.abs(model - values[2]).astype(np.float32))[::-1][rank - 1]
        assert threshold == expected


def test_at_least_one_difference_of_a_small_tensor_is_kept():
    values = [np.array([1.0, -3.0, 2.0], np.float32), np.zeros(3, np.float32)]
    assert thresholds(lambda: iter([values]), 3, 0.1) == [3.0]
