# SPDX-License-Identifier: Apache-2.0
"""Segments: lengths, cumulative lengths, and what is kept with them."""

import pytest
import torch

from mindvl_ops import OpsError, Segments


def test_lengths_come_back_from_cumulative_lengths():
    segments = Segments.from_cu_seqlens(torch.tensor([0, 3, 3, 10], dtype=torch.int32))
    assert (segments.lengths, segments.total, segments.max_length, len(segments)) == ((3, 0, 7), 10, 7, 3)
    assert segments.cu_seqlens("cpu").tolist() == [0, 3, 3, 10]
    assert segments.cu_seqlens("cpu").dtype == torch.int32
    assert segments.cu_seqlens("cpu") is segments.cu_seqlens(torch.device("cpu"))
    assert segments == Segments((3, 0, 7))


def test_a_pack_without_tokens_is_allowed():
    segments = Segments(())
    assert (segments.total, segments.max_length, segments.cu_seqlens("cpu").tolist()) == (0, 0, [0])


@pytest.mark.parametrize("bounds", [[3, 5], [], [0, 5, 2]])
def test_bounds_that_are_not_cumulative_are_refused(bounds):
    with pytest.raises(OpsError):
        Segments.from_cu_seqlens(torch.tensor(bounds, dtype=torch.int32))


def test_queries_are_the_last_keys_unless_requested():
    segments = Segments([2, 3], [5, 3])
    assert (segments.offsets, segments.key_total, segments.max_key_length) == ((3, 0), 8, 5)
    assert (segments.at_end, segments.is_self) == (True, False)
    assert segments.key_cu_seqlens("cpu").tolist() == [0, 5, 8]
    assert segments.cu_seqlens("cpu").tolist() == [0, 2, 5]
    moved = Segments([2, 3], [5, 3], offsets=[1, 0])
    assert not moved.at_end
    assert segments != moved
    assert len({segments, moved, Segments([2, 3], [5, 3], [3, 0])}) == 2
    assert Segments([2, 3]).key_cu_seqlens("cpu") is not segments.key_cu_seqlens("cpu")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([2, 3], [5]), "2 lengths, 1 key lengths"),
        (([2, 3], [5, 0]), "segment 1: 3 queries have no key"),
        (([2], [5], [4]), "segment 0: offset 4 is outside of 0 to 3"),
        (([2], [5], [-1]), "offset -1 is outside"),
        (([2], [5], [0, 0]), "2 offsets for 1 segments"),
    ],
)
def test_keys_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(OpsError, match=message):
        Segments(*arguments)
