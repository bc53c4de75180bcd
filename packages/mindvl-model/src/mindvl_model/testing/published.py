# SPDX-License-Identifier: Apache-2.0
"""Models of transformers' own classes beside ours: random ones written as directories, and the same inputs for both.

Comes after tiny.py and packs.py; the rivals of tests and of `mindvl check parity`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mindvl_model.config import MindVLConfig
from mindvl_model.hf.config_json import hf_config
from mindvl_model.testing.packs import RandomSegment, normalized_pixels, pack_segments


def random_qwen2_5_vl(config: MindVLConfig, *, seed: int = 0) -> Any:
    """A Qwen2_5_VLForConditionalGeneration of these sizes in which every parameter is random, norms and biases too."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**hf_config(config, torch.float32)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if parameter.ndim == 1 and parameter.mean() == 1 else 0.15 * noise)
    return model.eval()


def save_qwen2_5_vl(config: MindVLConfig, directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """The same, saved as a directory by transformers."""
    model = random_qwen2_5_vl(config, seed=seed).to(dtype)
    model.save_pretrained(directory)
    return model


def hf_inputs(segment: RandomSegment, config: MindVLConfig) -> dict[str, Any]:
    """One segment as keyword arguments of a transformers model."""
    inputs: dict[str, Any] = {"input_ids": segment.input_ids[None]}
    if len(segment.image_grid_thw):
        inputs["pixel_values"] = normalized_pixels(segment.pixel_values, config.vision)
        inputs["image_grid_thw"] = segment.image_grid_thw
    if len(segment.video_grid_thw):
        inputs["pixel_values_videos"] = normalized_pixels(segment.pixel_values_videos, config.vision)
        inputs["video_grid_thw"] = segment.video_grid_thw
    if config.position_kind != "rope":
        inputs["mm_token_type_ids"] = _token_types(segment, config)
        inputs["second_per_grid_ts"] = torch.tensor(segment.seconds_per_grid)
    return inputs


def pack_for(
    published: Any, segments: Sequence[RandomSegment], config: MindVLConfig, *, padding: int = 0
) -> dict[str, Any]:
    """One packed pack of our model, with three axes of positions as transformers' own function counts them."""
    pack = pack_segments(segments, padding=padding, pad_id=config.tokens.pad)
    if config.position_kind != "rope":
        positions = [_mrope_positions(published, segment, config) for segment in segments]
        pack["position_ids"] = torch.cat([*positions, torch.arange(padding).expand(3, -1)], dim=1)
    return pack


def _mrope_positions(published: Any, segment: RandomSegment, config: MindVLConfig) -> Tensor:
    positions: Tensor = published.model.get_rope_index(
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
