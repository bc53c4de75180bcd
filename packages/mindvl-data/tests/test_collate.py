# SPDX-License-Identifier: Apache-2.0
"""Collate: padding is its own segment; text-only and empty rows keep their shapes."""

import numpy as np
import torch

from mindvl_data import IGNORE_INDEX, Batch
from mindvl_data.collate import collate
from mindvl_data.types import PackedSample, TokenizedSample


def sample(length: int, num_patches: int = 0) -> TokenizedSample:
    return TokenizedSample(
        input_ids=np.arange(1, length + 1),
        labels=np.arange(2, length + 2),
        pixel_values=np.full((num_patches, 588), 7, np.uint8),
        image_grid_thw=np.array([[1, 2, num_patches // 2]] if num_patches else [], np.int64).reshape(-1, 3),
        pixel_values_videos=np.zeros((0, 1176), np.uint8),
        video_grid_thw=np.zeros((0, 3), np.int64),
        seconds_per_grid=np.zeros(0),
    )


def row(*samples: TokenizedSample) -> Batch:
    return collate(
        PackedSample(samples=samples, segments=()),
        step=1,
        position_kind="rope",
        pad_id=0,
        image_pad_id=99,
        pad_multiple=8,
        patch_dim=588,
        spatial_merge_size=2,
    )


def test_padding_is_the_last_segment_and_learns_nothing() -> None:
    batch = row(sample(5), sample(6))
    assert batch.cu_seqlens.tolist() == [0, 5, 11, 16]
    assert batch.max_seqlen == 6
    assert batch.input_ids[11:].tolist() == [0] * 5
    assert batch.labels[11:].tolist() == [IGNORE_INDEX] * 5
    assert batch.position_ids[0].tolist() == [*range(5), *range(6), *range(5)]
    assert batch.num_label_tokens == 11


def test_a_row_that_needs_no_padding_has_no_padding_segment() -> None:
    assert row(sample(8)).cu_seqlens.tolist() == [0, 8]


def test_a_text_only_row_has_no_patches() -> None:
    batch = row(sample(8))
    assert batch.pixel_values.shape == (0, 588)
    assert batch.pixel_values.dtype == torch.uint8
    assert batch.image_grid_thw.shape == (0, 3)


def test_a_row_without_samples_is_all_padding() -> None:
    batch = row()
    assert batch.cu_seqlens.tolist() == [0, 8]
    assert batch.num_label_tokens == 0


def test_pictures_stand_end_to_end() -> None:
    batch = row(sample(4, 4), sample(4, 8))
    assert batch.pixel_values.shape == (12, 588)
    assert batch.image_grid_thw.tolist() == [[1, 2, 2], [1, 2, 4]]
