# SPDX-License-Identifier: Apache-2.0
"""Sparse modes chosen by segments, the one mask of a device, and the bytes it saves."""

import pytest
import torch

from mindvl_ops import OpsError, Segments
from mindvl_ops.npu.masks import NO_LIMIT, describe, shared_mask


def _mode(segments, causal=True, window=None):
    (found,) = describe(segments, causal=causal, window=window)
    return found.sparse_mode, found.pre_tokens, found.next_tokens


def test_lengths_are_cumulative_python_ints_without_a_leading_zero_or_empty_segments():
    (found,) = describe(Segments([0, 2, 0, 3, 0]), causal=True, window=None)
    assert (found.query_ends, found.key_ends) == ([2, 5], [2, 5])


def test_keys_without_queries_are_left_out_at_both_ends_and_passed_over_between():
    (cut,) = describe(Segments([0, 3, 0, 1, 0], key_lengths=[4, 7, 2, 1, 5]), causal=True, window=None)
    assert (cut.query_ends, cut.key_ends) == ([3, 3, 4], [7, 9, 10])
    assert (cut.query_range, cut.key_range) == ((0, 4), (4, 14))


def test_a_pack_of_many_segments_is_split_between_two_of_them(monkeypatch):
    monkeypatch.setattr("mindvl_ops.npu.masks.MAX_SEGMENTS", 2)
    monkeypatch.setattr("mindvl_ops.npu.masks.MAX_TOKENS", 10)
    pack = Segments([0, 2, 3, 0, 4, 9, 1, 0], key_lengths=[1, 2, 3, 5, 4, 9, 1, 6])
    calls = describe(pack, causal=True, window=None)
    assert [call.query_range for call in calls] == [(0, 5), (5, 9), (9, 19)]
    assert [call.key_range for call in calls] == [(1, 6), (11, 15), (15, 25)]
    assert [call.query_ends for call in calls] == [[2, 5], [4], [9, 10]]
    assert describe(Segments([0], key_lengths=[3]), causal=True, window=None) == ()


@pytest.mark.parametrize(
    ("segments", "causal", "window", "expected"),
    [
        (Segments([4, 9]), False, None, (0, NO_LIMIT, NO_LIMIT)),
        (Segments([4, 9]), False, (-1, -1), (0, NO_LIMIT, NO_LIMIT)),
        (Segments([4, 9]), True, None, (2, NO_LIMIT, NO_LIMIT)),
        (Segments([4, 9]), False, (-1, 0), (2, NO_LIMIT, NO_LIMIT)),
        (Segments([4, 9], [6, 9]), True, None, (3, NO_LIMIT, NO_LIMIT)),
        (Segments([4, 9]), True, (3, -1), (4, 3, 0)),
        (Segments([4, 9]), False, (3, 5), (4, 3, 5)),
        (Segments([4, 9], [6, 11], offsets=[0, 0]), False, (3, 1), (4, 5, -1)),
        (Segments([4, 9, 5], [6, 9, 9], offsets=[2, 0, 1]), True, None, (7, NO_LIMIT, -3)),
        (Segments([4, 9, 5], [9, 9, 9], offsets=[3, 0, 0]), True, None, (8, NO_LIMIT, -2)),
    ],
)
def test_the_mode_follows_from_the_segments(segments, causal, window, expected):
    assert _mode(segments, causal, window) == expected


def test_what_the_kernel_cannot_say_is_refused():
    with pytest.raises(OpsError, match="only the first or the last segment"):
        describe(Segments([2, 2, 2], [4, 4, 4], offsets=[1, 1, 1]), causal=True, window=None)
    with pytest.raises(OpsError, match="one band for all segments"):
        describe(Segments([2, 2], [4, 4], offsets=[1, 2]), causal=True, window=(1, 0))


def test_there_is_one_mask_for_a_device():
    mask = shared_mask(torch.device("cpu"))
    assert mask is shared_mask(torch.device("cpu"))
    assert (mask.shape, mask.dtype) == ((2048, 2048), torch.bool)
    assert mask[5, :8].tolist() == [False] * 6 + [True] * 2


def test_a_fake_mask_does_not_outlive_its_mode(monkeypatch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr("mindvl_ops.npu.masks._shared", {})
    with FakeTensorMode():
        shared_mask(torch.device("cpu"))
    assert type(shared_mask(torch.device("cpu"))) is torch.Tensor
