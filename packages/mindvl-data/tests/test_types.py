# SPDX-License-Identifier: Apache-2.0
"""Batch: what the model gets, and moving it."""

from collections.abc import Callable

import torch

from mindvl_data import DataConfig, Loader


def test_a_batch_moves_with_all_its_tensors_and_keeps_the_rest(make_config: Callable[..., DataConfig]) -> None:
    with Loader(make_config(num_threads=0), packs_per_step=1, position_kind="rope") as loader:
        batch = next(loader)
    moved = batch.to("meta")
    tensors = [value for value in moved.model_inputs().values() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 6
    assert all(tensor.is_meta for tensor in tensors)
    assert moved.segments == batch.segments
    assert set(batch.model_inputs()) == {
        "input_ids", "labels", "position_ids", "cu_seqlens", "max_seqlen", "pixel_values", "image_grid_thw",
    }  # fmt: skip
