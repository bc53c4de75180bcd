# SPDX-License-Identifier: Apache-2.0
"""Collate: padding is its own segment; text-only and empty packs keep their shapes."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from mindvl_data import IGNORE_INDEX, Batch, DataError
from mindvl_data.collate import collate
from mindvl_data.positions import PositionKind
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


def pack(*samples: TokenizedSample, position_kind: PositionKind = "rope", vocab_size: int | None = None) -> Batch:
    return collate(
        PackedSample(samples=samples, references=()),
        vocab_size=vocab_size,
        step=1,
        position_kind=position_kind,
        pad_id=0,
        image_pad_id=99,
        video_pad_id=98,
        pad_multiple=8,
        patch_dim=588,
        spatial_merge_size=2,
    )


def test_padding_is_the_last_segment_and_learns_nothing() -> None:
    batch = pack(sample(5), sample(6))
    assert batch.cu_seqlens.tolist() == [0, 5, 11, 16]
    assert batch.max_seqlen == 6
    assert batch.input_ids[11:].tolist() == [0] * 5
    assert batch.labels[11:].tolist() == [IGNORE_INDEX] * 5
    assert batch.position_ids[0].tolist() == [*range(5), *range(6), *range(5)]
    assert batch.num_loss_tokens == 11


def test_loss_positions_are_those_of_all_labels_also_of_token_0() -> None:
    labels = np.array([IGNORE_INDEX, 0, 5, IGNORE_INDEX])
    batch = pack(sample(3), replace(sample(4), labels=labels))
    assert batch.loss_positions.tolist() == [0, 1, 2, 4, 5]


def test_a_pack_that_needs_no_padding_has_no_padding_segment() -> None:
    assert pack(sample(8)).cu_seqlens.tolist() == [0, 8]


def test_a_text_only_pack_has_no_patches() -> None:
    batch = pack(sample(8))
    assert batch.pixel_values.shape == (0, 588)
    assert batch.pixel_values.dtype == torch.uint8
    assert batch.image_grid_thw.shape == (0, 3)


def test_a_pack_without_samples_is_all_padding() -> None:
    batch = pack()
    assert batch.cu_seqlens.tolist() == [0, 8]
    assert batch.num_loss_tokens == 0


def test_images_stand_end_to_end() -> None:
    batch = pack(sample(4, 4), sample(4, 8))
    assert batch.pixel_values.shape == (12, 588)
    assert batch.image_grid_thw.tolist() == [[1, 2, 2], [1, 2, 4]]


def test_videos_stand_end_to_end_and_have_their_moments() -> None:
    def film(steps: int, seconds: float) -> TokenizedSample:
        return replace(
            sample(steps + 2),
            input_ids=np.array([1, *[98] * steps, 2]),
            pixel_values_videos=np.full((4 * steps, 1176), steps, np.uint8),
            video_grid_thw=np.array([[steps, 2, 2]]),
            seconds_per_grid=np.array([seconds]),
        )

    batch = pack(film(3, 2.0), film(1, 1.0), position_kind="mrope")
    assert batch.pixel_values_videos[:, 0].tolist() == [3] * 12 + [1] * 4
    assert batch.video_grid_thw.tolist() == [[3, 2, 2], [1, 2, 2]]
    assert batch.position_ids[0].tolist() == [0, 1, 5, 9, 2, 0, 1, 2]
    assert pack().pixel_values_videos.shape == (0, 1176)


@pytest.mark.parametrize("label", [-1, -5, -101, 10, 13])
def test_a_label_outside_the_vocabulary_is_refused(label: int) -> None:
    good = sample(5)
    pack(good, vocab_size=10)
    labels = good.labels.copy()
    labels[:2] = IGNORE_INDEX
    pack(replace(good, labels=labels), vocab_size=10)
    labels[3] = label
    what = rf"step 1: labels of a pack hold token {label}, which lies outside the model's vocabulary of 10 tokens"
    with pytest.raises(DataError, match=what):
        pack(replace(good, labels=labels), vocab_size=10)


@pytest.mark.parametrize("token", [-1, -100, 10])
def test_a_token_outside_the_vocabulary_is_refused_though_nothing_is_learned_from_it(token: int) -> None:
    good = sample(5)
    ids, labels = good.input_ids.copy(), np.full(5, IGNORE_INDEX)
    ids[4] = token
    with pytest.raises(DataError, match=rf"input_ids of a pack hold token {token},"):
        pack(replace(good, input_ids=ids, labels=labels), vocab_size=10)
    if token < 0:
        with pytest.raises(DataError, match="outside the model's vocabulary"):
            pack(replace(good, input_ids=ids, labels=labels))
