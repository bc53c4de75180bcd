# SPDX-License-Identifier: Apache-2.0
"""Random packed packs as the data package would hand them over, made of segments that can also be run alone.

Comes after tiny.py; what it makes are the keyword arguments of MindVLModel.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mindvl_model.config import MindVLConfig, VisionConfig

IGNORE_INDEX = -100
FIRST_TEXT_TOKEN = 7  # lower ids are special


@dataclass(frozen=True, kw_only=True)
class RandomSegment:
    """One sample: text with images and videos in between."""

    input_ids: Tensor  # int64 [S]
    labels: Tensor  # int64 [S], shifted
    pixel_values: Tensor  # uint8 [P, C*patch*patch]
    image_grid_thw: Tensor  # int64 [num_images, 3]
    pixel_values_videos: Tensor  # uint8 [P_videos, C*temporal_patch*patch*patch]
    video_grid_thw: Tensor  # int64 [num_videos, 3]
    seconds_per_grid: tuple[float, ...]  # [num_videos], time between two steps of a video's grid


def random_segment(
    config: MindVLConfig,
    grids: Sequence[tuple[int, int, int]] = (),
    *,
    num_text: int = 5,
    seed: int = 0,
    videos: Sequence[tuple[int, int, int]] = (),
) -> RandomSegment:
    """Text, then each image and video followed by text; about half of the text is learned, its last token surely.

    Args:
        grids: Patches along time, height, width of each image.
        num_text: Text tokens before, between and after the images each.
        videos: Patches along time, height, width of each video.
    """
    generator = torch.Generator().manual_seed(seed)
    vision, tokens = config.vision, config.tokens

    special = torch.tensor([token for token in vars(tokens).values() if token is not None])

    def text() -> Tensor:
        ids = torch.randint(FIRST_TEXT_TOKEN, config.language.vocab_size, (num_text,), generator=generator)
        return torch.where(torch.isin(ids, special), FIRST_TEXT_TOKEN, ids)

    pieces = [text()]
    shown = [(tokens.image, grid) for grid in grids] + [(tokens.video, grid) for grid in videos]
    for placeholder, (time, height, width) in shown:
        pads = [placeholder] * (time * height * width // vision.spatial_merge_size**2)
        pieces += [torch.tensor([tokens.vision_start, *pads, tokens.vision_end]), text()]
    input_ids = torch.cat(pieces)
    following = torch.cat((input_ids[1:], input_ids.new_tensor([tokens.end_of_turn])))
    learned = (torch.rand(len(input_ids), generator=generator) < 0.5) & (following >= FIRST_TEXT_TOKEN)
    learned[-1] = True
    patch_dim = vision.in_channels * vision.patch_size**2

    def patches(grids: Sequence[tuple[int, int, int]], size: int) -> Tensor:
        count = sum(time * height * width for time, height, width in grids)
        return torch.randint(0, 256, (count, size), generator=generator, dtype=torch.uint8)

    return RandomSegment(
        input_ids=input_ids,
        labels=torch.where(learned, following, IGNORE_INDEX),
        pixel_values=patches(grids, patch_dim),
        image_grid_thw=torch.tensor(list(grids), dtype=torch.int64).reshape(-1, 3),
        pixel_values_videos=patches(videos, vision.temporal_patch_size * patch_dim),
        video_grid_thw=torch.tensor(list(videos), dtype=torch.int64).reshape(-1, 3),
        seconds_per_grid=tuple(0.5 * (1 + place) for place in range(len(videos))),
    )


def pack_segments(segments: Sequence[RandomSegment], *, padding: int = 0, pad_id: int = 0) -> dict[str, Any]:
    """One packed pack as keyword arguments of the model; padding is a last segment of its own."""
    lengths = [len(segment.input_ids) for segment in segments] + ([padding] if padding else [])
    rest = torch.full((padding,), pad_id)
    return {
        "input_ids": torch.cat([*(segment.input_ids for segment in segments), rest]),
        "labels": torch.cat([*(segment.labels for segment in segments), torch.full((padding,), IGNORE_INDEX)]),
        "position_ids": torch.cat([torch.arange(length) for length in lengths]).expand(3, -1),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        "max_seqlen": max(lengths),
        "pixel_values": torch.cat([segment.pixel_values for segment in segments]),
        "image_grid_thw": torch.cat([segment.image_grid_thw for segment in segments]),
        "pixel_values_videos": torch.cat([segment.pixel_values_videos for segment in segments]),
        "video_grid_thw": torch.cat([segment.video_grid_thw for segment in segments]),
    }


def normalized_pixels(pixel_values: Tensor, config: VisionConfig) -> Tensor:
    """The same patches as transformers' processors give them: normalised, an image copied to each temporal slice."""
    num_frames = pixel_values.shape[1] // (config.in_channels * config.patch_size**2)
    shape = (-1, config.in_channels, num_frames, config.patch_size**2)
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (config.image_mean, config.image_std))
    pixels = (pixel_values.view(shape).float() / 255 - mean) / std
    return pixels.expand(-1, -1, config.temporal_patch_size, -1).flatten(1)
