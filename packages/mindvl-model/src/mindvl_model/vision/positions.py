# SPDX-License-Identifier: Apache-2.0
"""Order of patches by window, attention segments and rotary positions for the images of a packed sequence.

Computed from image_grid_thw for the vision encoder, as in Qwen2.5-VL: patches are given in merge-block order (2x2
neighbours are adjacent); windows consist of whole merge blocks and do not cross images or frames.
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
class PatchOrder:
    """Order, segments and positions of the patches of a pack in the vision encoder, on the host."""

    order: Tensor | None  # [G] order of merge blocks by window; None if every layer has full attention
    restore: Tensor | None  # [G] inverse of `order`
    full: Segments  # one segment per frame
    windows: Segments  # one segment per window
    positions: Tensor  # [P, 2] row and column of each patch, in this order


def patch_order(grids: Sequence[Grid], config: VisionConfig) -> PatchOrder:
    """Compute the order of the patches of images.

    Args:
        grids: Patches along time, height and width of each image; height and width are multiples of spatial_merge_size.
        config: Configuration of the vision encoder.
    """
    merge = config.spatial_merge_size
    windowed = len(config.full_attention_layers) < config.num_layers
    window = config.window_size // config.patch_size // merge
    positions = [_positions(grid, merge) for grid in grids]
    full = [height * width for time, height, width in grids for _ in range(time)]
    if not windowed:
        whole = Segments(tuple(full))
        return PatchOrder(None, None, whole, whole, torch.from_numpy(np.concatenate(positions)))
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
    return PatchOrder(
        order=torch.from_numpy(order),
        restore=torch.from_numpy(np.argsort(order)),
        full=Segments(tuple(full)),
        windows=Segments(tuple(lengths)),
        positions=torch.from_numpy(by_block.reshape(-1, 2)),
    )


def rotary_angles(positions: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine [P, D] of the 2-D rotary embedding: D/4 frequencies each for row and column, repeated once."""
    quarter = torch.arange(0, head_dim // 2, 2, dtype=torch.float32, device=positions.device) / (head_dim // 2)
    angles = (positions[..., None].float() / base**quarter).flatten(1)  # [P, 2, D/4] -> [P, D/2]
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


@lru_cache(maxsize=4096)
def _positions(grid: Grid, merge: int) -> np.ndarray:
    time, height, width = grid
    rows, columns = np.meshgrid(np.arange(height), np.arange(width), indexing="ij")
    coordinates = np.stack((rows, columns), axis=-1)
    blocks = coordinates.reshape(height // merge, merge, width // merge, merge, 2).transpose(0, 2, 1, 3, 4)
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
