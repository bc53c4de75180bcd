# SPDX-License-Identifier: Apache-2.0
"""Three-axis position ids of one segment.

Comes after tokenization, used by collate. "rope" counts tokens (1-D rotary embedding); "mrope" gives visual tokens
their place in the picture (M-RoPE of Qwen2-VL, arXiv 2409.12191, as in transformers' Qwen2.5-VL).
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

PositionKind = Literal["rope", "mrope"]


def segment_positions(
    input_ids: NDArray[np.int64],
    image_grid_thw: NDArray[np.int64],
    *,
    kind: PositionKind,
    image_pad_id: int,
    spatial_merge_size: int,
) -> NDArray[np.int64]:
    """Positions [3, S] (time, height, width) of one segment of S tokens, starting at 0.

    Args:
        input_ids: [S]; each picture is one run of `image_pad_id`.
        image_grid_thw: [num_images, 3] in patches, in the order of the runs.
    """
    if kind == "rope" or not len(image_grid_thw):
        return np.broadcast_to(np.arange(len(input_ids), dtype=np.int64), (3, len(input_ids)))
    positions = np.empty((3, len(input_ids)), np.int64)
    is_pad = input_ids == image_pad_id
    starts = np.flatnonzero(is_pad & ~np.concatenate(([False], is_pad[:-1])))
    token, position = 0, 0
    for start, (time, height, width) in zip(starts.tolist(), image_grid_thw.tolist(), strict=True):
        grid = (time, height // spatial_merge_size, width // spatial_merge_size)
        positions[:, token:start] = np.arange(start - token) + position
        position += start - token
        token = start + grid[0] * grid[1] * grid[2]
        positions[:, start:token] = np.indices(grid).reshape(3, -1) + position
        position += max(grid[1], grid[2])
    positions[:, token:] = np.arange(len(input_ids) - token) + position
    return positions
