# SPDX-License-Identifier: Apache-2.0
"""Sums are wider than what is added."""

import ml_dtypes
import numpy as np
import pytest

from mindvl_merge.methods.values import accumulator, differences


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ((ml_dtypes.bfloat16, np.float16), np.float32),
        ((ml_dtypes.bfloat16, np.float32), np.float64),
        ((np.float64,), np.float64),
    ],
)
def test_sixteen_bits_are_added_in_float32_and_others_in_float64(dtypes, expected):
    assert accumulator([np.zeros(1, dtype) for dtype in dtypes]) == expected


def test_differences_are_from_the_last_block():
    deltas, base = differences([np.array([3.0]), np.array([5.0]), np.array([1.0])])
    assert ([delta.tolist() for delta in deltas], base.tolist()) == ([[2.0], [4.0]], [1.0])
