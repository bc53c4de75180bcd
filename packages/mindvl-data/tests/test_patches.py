# SPDX-License-Identifier: Apache-2.0
"""Tests of the patch buffer of a packed sequence and of the reused memory."""

import numpy as np

from mindvl_data.patches import PatchBuffer, Scratch


def test_what_is_put_in_stands_end_to_end_and_can_be_taken_back() -> None:
    buffer = PatchBuffer(5, 2)
    buffer.take(2)[:] = 1
    buffer.take(3)[:] = 2
    assert buffer.since(2).tolist() == [[2, 2]] * 3
    buffer.used = 2
    assert buffer.since(0).tolist() == [[1, 1]] * 2
    buffer.take(1)[:] = 3
    assert buffer.since(0).tolist() == [[1, 1], [1, 1], [3, 3]]


def test_memory_is_used_again_unless_it_is_huge() -> None:
    scratch = Scratch()
    first, other, smaller = scratch.take("a", 1000), scratch.take("b", 1000), scratch.take("a", 10)
    assert (len(first), len(smaller)) == (1000, 10)
    assert np.shares_memory(first, smaller)
    assert not np.shares_memory(first, other)
    huge = scratch.take("a", (1 << 24) + 1)
    assert not np.shares_memory(huge, scratch.take("a", 1000))
