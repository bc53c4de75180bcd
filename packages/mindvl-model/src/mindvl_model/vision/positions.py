# SPDX-License-Identifier: Apache-2.0
"""Where each patch lies: order inside windows, attention segments and rotary positions of a row of images.

Comes after the batch's image_grid_thw, before the vision_encoder. Follows Qwen2.5-VL: patches arrive in merge-block order (2x2
neighbours together), windows are cut on merge blocks and never cross images or frames.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from mindvl_model.config import VisionConfig
from mindvl_ops import Segments

Grid = tuple[int, int, int]  # patches along time, height, width


@dataclass(frozen=True)
class VisionLayout:
    """Everything the vision encoder derives from the grids of one row, on the host."""

    order: Tensor | None  # [G] block order that puts windows together; None when every layer is full
    restore: Tensor | None  # [G] its inverse
    full: Segments  # one segment per frame
    windows: Segments  # one segment per window
    positions: Tensor  # [P, 2] row and column of each patch, in the vision_encoder's order


def vision_layout(grids: Sequence[Grid], config: VisionConfig) -> VisionLayout:
    """Plan a row of images.

    Args:
        grids: Patches along time, height, width of each image, height and width multiples of spatial_merge_size.
    """
    merge = config.spatial_merge_size
    windowed = len(config.full_attention_layers) < config.num_layers
    window = config.window_size // config.patch_size // merge
    positions = [_positions(grid, merge) for grid in grids]
    full = [height * width for time, height, width in grids for _ in range(time)]
    if not windowed:
        whole = Segments(tuple(full))
        return VisionLayout(None, None, whole, whole, torch.from_numpy(np.concatenate(positions)))
    orders: list[np.ndarray] = []
    lengths: list[int] = []
    first_block = 0
    for grid in grids:
        order, window_lengths = _windows(grid, merge, window)
        orders.append(order + first_block)
        lengths.extend(window_lengths)
        first_block += len(order)
    order = np.concatenate(orders)
    by_block = np.concatenate(positions).reshape(-1, merge**2, 2)[order]
    return VisionLayout(
        order=torch.from_numpy(order),
        restore=torch.from_numpy(np.argsort(order)),
        full=Segments(tuple(full)),
        windows=Segments(tuple(lengths)),
        positions=torch.from_numpy(by_block.reshape(-1, 2)),
    )


def rotary_angles(positions: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine [P, D] of 2-D rotary embedding: a quarter of the pairs each for row and column, then repeated."""
    quarter = torch.arange(0, head_dim // 2, 2, dtype=torch.float32, device=positions.device) / (head_dim // 2)
    angles = (positions[..., None].float() / base**quarter).flatten(1)  # [P, 2, D/4] -> [P, D/2]
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


@lru_cache(maxsize=4096)
def _positions(grid: Grid, merge: int) -> np.ndarray:
    time, height, width = grid
    rows, columns = np.meshgrid(np.arange(height), np.arange(width), indexing="ij")
    place = np.stack((rows, columns), axis=-1)
    blocks = place.reshape(height // merge, merge, width // merge, merge, 2).transpose(0, 2, 1, 3, 4)
    return np.tile(blocks.reshape(-1, 2), (time, 1))


@lru_cache(maxsize=4096)
def _windows(grid: Grid, merge: int, window: int) -> tuple[np.ndarray, tuple[int, ...]]:
    time, rows, columns = grid[0], grid[1] // merge, grid[2] // merge
    index = np.arange(time * rows * columns).reshape(time, rows, columns)
    pieces = [
        index[frame, top : top + window, left : left + window].reshape(-1)
        for frame in range(time)
        for top in range(0, rows, window)
        for left in range(0, columns, window)
    ]
    return np.concatenate(pieces), tuple(len(piece) * merge**2 for piece in pieces)
