# SPDX-License-Identifier: Apache-2.0
"""The average by hand, and exact where it can be."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindvl_merge.methods import average


def test_weights_are_applied_in_order():
    assert average([np.array([1.0, 2.0]), np.array([3.0, 6.0])], (0.75, 0.25)).tolist() == [1.5, 3.0]


@given(count=st.integers(1, 7), seed=st.integers(0, 50))
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_copies_of_one_model_give_the_model(dtype, count, seed):
    block = np.random.default_rng(seed).standard_normal(50).astype(dtype)
    assert np.array_equal(average([block] * count, (1 / count,) * count).astype(dtype), block)


def test_sums_are_wide_and_the_inputs_are_not_changed():
    block = np.ones(2, np.float32)
    result = average([block, block], (0.1, 0.2))
    assert result.dtype == np.float64
    assert average([block.astype(np.float16)], (1.0,)).dtype == np.float32
    assert block.tolist() == [1, 1]


def test_scratch_memory_gives_the_same_values():
    blocks = [np.random.default_rng(seed).standard_normal(50).astype(ml_dtypes.bfloat16) for seed in range(3)]
    scratch = (np.full(80, np.nan, np.float32), np.full(80, np.nan, np.float32))
    for weights in ((1 / 3,) * 3, (0.5, 0.3, 0.2)):
        assert np.array_equal(average(blocks, weights, scratch), average(blocks, weights))
