# SPDX-License-Identifier: Apache-2.0
"""Interpolation on the arc: by hand for right angles, by the formula in float64 for others."""

import math

import numpy as np
import pytest

from mindvl_merge.methods import angle, slerp


def test_half_way_between_right_angles_keeps_the_length():
    blocks = [np.array([1.0, 0.0]), np.array([0.0, 1.0])]
    assert slerp(blocks, (0.5, 0.5), angle([blocks])) == pytest.approx([math.sqrt(0.5)] * 2)


def test_the_angle_is_that_of_whole_tensors_in_any_pieces():
    one, two = np.random.default_rng(0).standard_normal((2, 100))
    whole = math.acos(one @ two / np.linalg.norm(one) / np.linalg.norm(two))
    found = angle([[one[:30], two[:30]], [one[30:], two[30:]]])
    assert math.acos(found.cosine) == pytest.approx(whole, rel=1e-12)
    expected = (math.sin(0.7 * whole) * one + math.sin(0.3 * whole) * two) / math.sin(whole)
    assert slerp([one, two], (0.7, 0.3), found) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("other", [[1.0, 2.0], [1.0001, 2.0], [0.0, 0.0], [-1.0, -2.0]])
def test_parallel_and_zero_tensors_are_averaged(other):
    blocks = [np.array([1.0, 2.0]), np.array(other)]
    assert slerp(blocks, (0.25, 0.75), angle([blocks])) == pytest.approx(0.25 * blocks[0] + 0.75 * blocks[1])
