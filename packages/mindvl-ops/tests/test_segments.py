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


def test_a_row_without_tokens_is_allowed():
    segments = Segments(())
    assert (segments.total, segments.max_length, segments.cu_seqlens("cpu").tolist()) == (0, 0, [0])


@pytest.mark.parametrize("bounds", [[3, 5], [], [0, 5, 2]])
def test_bounds_that_are_not_cumulative_are_refused(bounds):
    with pytest.raises(OpsError):
        Segments.from_cu_seqlens(torch.tensor(bounds, dtype=torch.int32))
