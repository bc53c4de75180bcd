# SPDX-License-Identifier: Apache-2.0
"""Three-axis position ids of one segment.

Comes after tokenization, used by collate. "rope" counts tokens (1-D rotary embedding); "mrope" and "mrope_all_axes"
encode the position of visual tokens in the image and their time in the video (M-RoPE of Qwen2-VL, arXiv 2409.12191, with
Qwen2.5-VL's absolute time, arXiv 2502.13923), as `get_rope_index` of transformers' Qwen2.5-VL computes them. The two
differ in the position of text after a video: "mrope" (transformers from 5.3) continues after the larger of height and
width, "mrope_all_axes" (transformers before 5.3) after the largest position on all three axes, including time.
"mrope_frames" is the rule of Qwen3-VL, whose videos have timestamps in the text: each temporal patch is one run of
placeholders with the positions of an image.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

PositionKind = Literal["rope", "mrope", "mrope_all_axes", "mrope_frames"]

TOKENS_PER_SECOND = 2  # time positions per second of video, as in Qwen2.5-VL's checkpoints


@dataclass(frozen=True, kw_only=True)
class MediaGrids:
    """The media of one segment, in patches."""

    images: NDArray[np.int64]  # [num_images, 3], time, height, width
    videos: NDArray[np.int64]  # [num_videos, 3]
    seconds_per_grid: Sequence[float]  # [num_videos], time between two steps of a video's grid


def segment_positions(
    input_ids: NDArray[np.int64],
    media: MediaGrids,
    *,
    kind: PositionKind,
    image_pad_id: int,
    video_pad_id: int | None,
    spatial_merge_size: int,
) -> NDArray[np.int64]:
    """Positions [3, S] (time, height, width) of one segment of S tokens, starting at 0.

    Args:
        input_ids: [S]; each image is one run of `image_pad_id`, each video one run of `video_pad_id`, with
            "mrope_frames" one for each temporal patch, and text separates the runs.
    """
    if kind == "rope" or not (len(media.images) or len(media.videos)):
        return np.broadcast_to(np.arange(len(input_ids), dtype=np.int64), (3, len(input_ids)))
    positions = np.empty((3, len(input_ids)), np.int64)
    is_video = input_ids == (-1 if video_pad_id is None else video_pad_id)
    is_pad = is_video | (input_ids == image_pad_id)
    starts = np.flatnonzero(is_pad & ~np.concatenate(([False], is_pad[:-1])))
    images, video_grids, intervals = iter(media.images.tolist()), media.videos.tolist(), iter(media.seconds_per_grid)
    by_frame = kind == "mrope_frames"
    if by_frame:
        video_grids = [(1, height, width) for time, height, width in video_grids for _ in range(time)]
    videos = iter(video_grids)
    token, position = 0, 0
    for start in starts.tolist():
        time, height, width = next(videos if is_video[start] else images)
        interval = TOKENS_PER_SECOND * next(intervals) if is_video[start] and not by_frame else 1.0
        grid = (time, height // spatial_merge_size, width // spatial_merge_size)
        positions[:, token:start] = np.arange(start - token) + position
        position += start - token
        token = start + grid[0] * grid[1] * grid[2]
        places = np.indices(grid).reshape(3, -1)
        places[0] = places[0].astype(np.float32) * np.float32(interval)  # truncated to integers, in torch's precision
        positions[:, start:token] = places + position
        position += int(places.max()) + 1 if kind == "mrope_all_axes" else max(grid[1], grid[2])
    positions[:, token:] = np.arange(len(input_ids) - token) + position
    return positions
