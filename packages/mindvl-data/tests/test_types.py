# SPDX-License-Identifier: Apache-2.0
"""Batch: what the model gets, and moving it."""

from collections.abc import Callable

from mindvl_data import DataConfig, Loader


def test_a_batch_moves_with_its_tensors_and_keeps_on_the_host_what_is_planned_with_there(
    make_config: Callable[..., DataConfig],
) -> None:
    with Loader(make_config(num_threads=0), global_batch_size=1, position_kind="rope") as loader:
        batch = next(loader)
    moved = batch.to("meta")
    devices = {name: value.device.type for name, value in moved.model_inputs().items() if name != "max_seqlen"}
    assert devices == {
        "input_ids": "meta", "labels": "meta", "position_ids": "meta", "pixel_values": "meta",
        "pixel_values_videos": "meta",
        "cu_seqlens": "cpu", "image_grid_thw": "cpu", "video_grid_thw": "cpu",
    }  # fmt: skip
    assert moved.segments == batch.segments
    assert set(batch.model_inputs()) == {
        "input_ids", "labels", "position_ids", "cu_seqlens", "max_seqlen", "pixel_values", "image_grid_thw",
        "pixel_values_videos", "video_grid_thw",
    }  # fmt: skip
