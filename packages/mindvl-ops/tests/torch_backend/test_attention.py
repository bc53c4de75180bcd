# SPDX-License-Identifier: Apache-2.0
"""The torch backend of attention equals the reference for random shapes, layouts and flags."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindvl_ops import Segments, attention
from mindvl_ops.testing import assert_parity
from mindvl_ops.torch_backend.padded import group_by_length, make_plan

layouts = st.one_of(
    st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any),
    st.integers(1, 12).map(lambda count: [1] * count),
    st.integers(1, 6).map(lambda count: [9] * count),
    st.just([150]),
    st.just([1, 150, 1]),
)
windows = st.one_of(st.none(), st.tuples(st.integers(-1, 5), st.integers(-1, 5)))


@settings(max_examples=60, deadline=None)
@given(
    lengths=layouts,
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    widths=st.sampled_from([(8, 8), (8, 4), (4, 8), (3, 3)]),
    causal=st.booleans(),
    window=windows,
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_torch_equals_reference(lengths, heads, widths, causal, window, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    query = torch.randn(total, heads[0], widths[0], generator=generator).to(dtype)
    key = torch.randn(total, heads[1], widths[0], generator=generator).to(dtype)
    value = torch.randn(total, heads[1], widths[1], generator=generator).to(dtype)
    segments = Segments(lengths)
    assert_parity(lambda q, k, v: attention(q, k, v, segments, causal=causal, window=window), (query, key, value))


def test_slices_of_one_fused_projection_are_accepted():
    fused = torch.randn(20, 3, 2, 8)
    for lengths in ([20], [10, 10], [4, 16]):
        segments = Segments(lengths)
        assert_parity(lambda x, s=segments: attention(x[:, 0], x[:, 1], x[:, 2], s, causal=False), (fused,))


@given(lengths=st.lists(st.integers(0, 200), max_size=30))
def test_every_segment_is_in_one_group_and_padding_is_bounded(lengths):
    groups = group_by_length(tuple(lengths))
    assert sorted(number for group in groups for number in group) == [i for i, n in enumerate(lengths) if n]
    for group in groups:
        longest = max(lengths[i] for i in group)
        assert all(lengths[i] >= min(0.85 * longest, longest - 8) for i in group)


def test_a_plan_visits_every_token_once():
    plan = make_plan(Segments([3, 90, 1, 50, 0, 2]), torch.device("cpu"))
    tokens = torch.cat([bucket.token_index for bucket in plan.buckets])
    assert torch.equal(tokens[plan.place], torch.arange(146))


@pytest.mark.parametrize(("lengths", "is_view"), [([5], True), ([5, 5, 5], True), ([5, 4], False)])
def test_equal_lengths_need_no_copy(lengths, is_view):
    assert make_plan(Segments(lengths), torch.device("cpu")).is_view is is_view


def test_the_plan_is_made_once_for_all_layers():
    segments = Segments([4, 9])
    calls = []
    original = segments.derived

    def counting(key, make):
        return original(key, lambda: (calls.append(key), make())[1])

    segments.derived = counting
    x = torch.randn(13, 1, 4)
    for _ in range(3):
        attention(x, x, x, segments, causal=False)
    assert len(calls) == len(set(calls))
