# SPDX-License-Identifier: Apache-2.0
"""Inputs of a transformers model from those of MindVLModel, to compare the two implementations.

Used by parity.py, by the alignment check of mindvl_train and by tests.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mindvl_model.config import MindVLConfig, VisionConfig
from mindvl_model.random_inputs import RandomSegment, pack_segments


def normalized_pixels(pixel_values: Tensor, config: VisionConfig) -> Tensor:
    """Normalize uint8 patches as the processors of transformers do; images are repeated along the temporal patch."""
    num_frames = pixel_values.shape[1] // (config.in_channels * config.patch_size**2)
    shape = (-1, config.in_channels, num_frames, config.patch_size**2)
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (config.image_mean, config.image_std))
    pixels = (pixel_values.view(shape).float() / 255 - mean) / std
    return pixels.expand(-1, -1, config.temporal_patch_size, -1).flatten(1)


def hf_inputs(segment: RandomSegment, config: MindVLConfig) -> dict[str, Any]:
    """One sample as keyword arguments of a transformers model."""
    inputs: dict[str, Any] = {"input_ids": segment.input_ids[None]}
    if len(segment.image_grid_thw):
        inputs["pixel_values"] = normalized_pixels(segment.pixel_values, config.vision)
        inputs["image_grid_thw"] = segment.image_grid_thw
    if len(segment.video_grid_thw):
        inputs["pixel_values_videos"] = normalized_pixels(segment.pixel_values_videos, config.vision)
        inputs["video_grid_thw"] = segment.video_grid_thw
    if config.position_kind != "rope":
        inputs["mm_token_type_ids"] = _token_types(segment, config)
        if not config.vision.entry.video.timestamps:
            inputs["second_per_grid_ts"] = torch.tensor(segment.seconds_per_grid)
    return inputs


def pack_for(
    hf_model: Any, segments: Sequence[RandomSegment], config: MindVLConfig, *, padding: int = 0
) -> dict[str, Any]:
    """Pack samples for MindVLModel; M-RoPE positions are computed by the transformers model."""
    pack = pack_segments(segments, padding=padding, pad_id=config.tokens.pad)
    if config.position_kind != "rope":
        positions = [_mrope_positions(hf_model, segment, config) for segment in segments]
        pack["position_ids"] = torch.cat([*positions, torch.arange(padding).expand(3, -1)], dim=1)
    return pack


def _mrope_positions(hf_model: Any, segment: RandomSegment, config: MindVLConfig) -> Tensor:
    positions: Tensor = hf_model.model.get_rope_index(
        segment.input_ids[None],
        _token_types(segment, config),
        image_grid_thw=segment.image_grid_thw,
        video_grid_thw=segment.video_grid_thw,
        second_per_grid_ts=torch.tensor(segment.seconds_per_grid),
    )[0]
    return positions[:, 0]


def _token_types(segment: RandomSegment, config: MindVLConfig) -> Tensor:
    ids, tokens = segment.input_ids, config.tokens
    is_video = torch.zeros_like(ids) if tokens.video is None else ids.eq(tokens.video).long()
    return (ids.eq(tokens.image).long() + 2 * is_video).int()[None]
