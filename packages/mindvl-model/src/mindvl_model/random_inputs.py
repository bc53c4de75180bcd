# SPDX-License-Identifier: Apache-2.0
"""Random samples and packed sequences with the tensors and shapes of the data package, for checks and tests.

The output of `pack_segments` is the keyword arguments of MindVLModel.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mindvl_model.config import MindVLConfig

IGNORE_INDEX = -100
FIRST_TEXT_TOKEN = 7  # lower ids are special tokens in the small models of the tests


@dataclass(frozen=True, kw_only=True)
class RandomSegment:
    """A sample: text with images and videos in between."""

    input_ids: Tensor  # int64 [S]
    labels: Tensor  # int64 [S], shifted
    pixel_values: Tensor  # uint8 [P, C*patch*patch]
    image_grid_thw: Tensor  # int64 [num_images, 3]
    pixel_values_videos: Tensor  # uint8 [P_videos, C*temporal_patch*patch*patch]
    video_grid_thw: Tensor  # int64 [num_videos, 3]
    seconds_per_grid: tuple[float, ...]  # [num_videos], seconds between two temporal grid positions of a video


def random_segment(
    config: MindVLConfig,
    grids: Sequence[tuple[int, int, int]] = (),
    *,
    num_text: int = 5,
    seed: int = 0,
    videos: Sequence[tuple[int, int, int]] = (),
) -> RandomSegment:
    """Make a sample of text followed by each image and video, with text after each of them.

    About half of the text tokens have a label, always including the last one.

    Args:
        config: Configuration of the model that the sample is for.
        grids: Patches along time, height and width of each image.
        num_text: Number of tokens of each piece of text.
        seed: Seed of all values.
        videos: Patches along time, height and width of each video.
    """
    generator = torch.Generator().manual_seed(seed)
    vision, tokens = config.vision, config.tokens

    special = torch.tensor([token for token in vars(tokens).values() if token is not None])

    def text() -> Tensor:
        ids = torch.randint(FIRST_TEXT_TOKEN, config.language.vocab_size, (num_text,), generator=generator)
        return torch.where(torch.isin(ids, special), FIRST_TEXT_TOKEN, ids)

    pieces = [text()]
    media = [(tokens.image, grid) for grid in grids] + [(tokens.video, grid) for grid in videos]
    for placeholder, (time, height, width) in media:
        by_frame = placeholder == tokens.video and vision.entry.video.timestamps
        steps = [1] * time if by_frame else [time]  # with timestamps, text precedes each temporal patch
        for number, step in enumerate(steps):
            pads = [placeholder] * (step * height * width // vision.spatial_merge_size**2)
            if number:
                pieces.append(text())
            pieces.append(torch.tensor([tokens.vision_start, *pads, tokens.vision_end]))
        pieces.append(text())
    input_ids = torch.cat(pieces)
    following = torch.cat((input_ids[1:], input_ids.new_tensor([tokens.end_of_turn])))
    has_label = (torch.rand(len(input_ids), generator=generator) < 0.5) & (following >= FIRST_TEXT_TOKEN)
    has_label[-1] = True
    patch_dim = vision.in_channels * vision.patch_size**2

    def patches(grids: Sequence[tuple[int, int, int]], size: int) -> Tensor:
        count = sum(time * height * width for time, height, width in grids)
        return torch.randint(0, 256, (count, size), generator=generator, dtype=torch.uint8)

    return RandomSegment(
        input_ids=input_ids,
        labels=torch.where(has_label, following, IGNORE_INDEX),
        pixel_values=patches(grids, patch_dim),
        image_grid_thw=torch.tensor(list(grids), dtype=torch.int64).reshape(-1, 3),
        pixel_values_videos=patches(videos, vision.temporal_patch_size * patch_dim),
        video_grid_thw=torch.tensor(list(videos), dtype=torch.int64).reshape(-1, 3),
        seconds_per_grid=tuple(0.5 * (1 + index) for index in range(len(videos))),
    )


def pack_segments(segments: Sequence[RandomSegment], *, padding: int = 0, pad_id: int = 0) -> dict[str, Any]:
    """Pack samples into one sequence, as keyword arguments of the model; padding becomes the last segment."""
    lengths = [len(segment.input_ids) for segment in segments] + ([padding] if padding else [])
    rest = torch.full((padding,), pad_id)
    labels = torch.cat([*(segment.labels for segment in segments), torch.full((padding,), IGNORE_INDEX)])
    return {
        "input_ids": torch.cat([*(segment.input_ids for segment in segments), rest]),
        "labels": labels,
        "position_ids": torch.cat([torch.arange(length) for length in lengths]).expand(3, -1),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        "max_seqlen": max(lengths),
        "pixel_values": torch.cat([segment.pixel_values for segment in segments]),
        "image_grid_thw": torch.cat([segment.image_grid_thw for segment in segments]),
        "pixel_values_videos": torch.cat([segment.pixel_values_videos for segment in segments]),
        "video_grid_thw": torch.cat([segment.video_grid_thw for segment in segments]),
        "loss_positions": (labels != IGNORE_INDEX).nonzero().squeeze(1),
    }
