# SPDX-License-Identifier: Apache-2.0
"""Padded batches of a packed sequence: every segment in one, little padding, the way back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mindvl_ops import Segments
from mindvl_ops.torch_backend.padded import group_by_length, padded_index


@given(lengths=st.lists(st.integers(0, 200), max_size=30))
def test_every_segment_is_in_one_group_and_padding_is_bounded(lengths):
    groups = group_by_length(tuple(lengths))
    assert sorted(number for group in groups for number in group) == [i for i, n in enumerate(lengths) if n]
    for group in groups:
        longest = max(lengths[i] for i in group)
        assert all(lengths[i] >= min(0.85 * longest, longest - 8) for i in group)


def test_a_plan_visits_every_token_once():
    index = padded_index(Segments([3, 90, 1, 50, 0, 2]), torch.device("cpu"))
    tokens = torch.cat([bucket.token_index for bucket in index.buckets])
    assert torch.equal(tokens[index.place], torch.arange(146))


@pytest.mark.parametrize(("lengths", "is_view"), [([5], True), ([5, 5, 5], True), ([5, 4], False)])
def test_equal_lengths_need_no_copy(lengths, is_view):
    assert padded_index(Segments(lengths), torch.device("cpu")).is_view is is_view
