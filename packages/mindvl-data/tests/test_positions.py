# SPDX-License-Identifier: Apache-2.0
"""Positions: by hand, and against transformers' Qwen2.5-VL."""

import numpy as np
import torch
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

from mindvl_data.positions import segment_positions

PAD = 9


def tokens(*runs: int) -> np.ndarray:
    """Text runs and picture runs in turn."""
    pieces = [np.full(run, PAD if number % 2 else 1, np.int64) for number, run in enumerate(runs)]
    return np.concatenate(pieces)


def positions(ids: np.ndarray, grid: np.ndarray, kind: str) -> np.ndarray:
    return segment_positions(ids, grid, kind=kind, image_pad_id=PAD, spatial_merge_size=2)


def test_rope_counts_every_token() -> None:
    result = positions(tokens(2, 4, 1), np.array([[1, 4, 4]]), "rope")
    assert result.tolist() == [list(range(7))] * 3


def test_mrope_of_one_small_picture_by_hand() -> None:
    result = positions(tokens(2, 6, 2), np.array([[1, 4, 6]]), "mrope")
    assert result[0].tolist() == [0, 1, 2, 2, 2, 2, 2, 2, 5, 6]
    assert result[1].tolist() == [0, 1, 2, 2, 2, 3, 3, 3, 5, 6]
    assert result[2].tolist() == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6]


def test_mrope_equals_transformers() -> None:
    ids = tokens(3, 6, 2, 20, 5)
    grid = np.array([[1, 4, 6], [1, 8, 10]])
    model = Qwen2_5_VLModel.__new__(Qwen2_5_VLModel)
    torch.nn.Module.__init__(model)
    model.config = Qwen2_5_VLConfig()
    expected, _ = model.get_rope_index(
        torch.from_numpy(ids)[None],
        mm_token_type_ids=torch.from_numpy((ids == PAD).astype(np.int64))[None],
        image_grid_thw=torch.from_numpy(grid),
    )
    np.testing.assert_array_equal(positions(ids, grid, "mrope"), expected[:, 0].numpy())
