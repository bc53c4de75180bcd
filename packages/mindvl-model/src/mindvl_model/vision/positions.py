# SPDX-License-Identifier: Apache-2.0
"""Order of patches by window, attention segments and positions for the images of a packed sequence.

Computed on the host from image_grid_thw for the vision encoder: patches are given in merge-block order (2x2 neighbours are
adjacent); windows consist of whole merge blocks and do not cross images or frames.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt

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
    rows: Tensor | None = None  # [P, 4] rows of the position embedding around each patch; None without one
    row_weights: Tensor | None = None  # [P, 4] float32, weights of these rows in the interpolation


def patch_order(grids: Sequence[Grid], config: VisionConfig) -> PatchOrder:
    """Compute the order of the patches of images.

    Args:
        grids: Patches along time, height and width of each image; height and width are multiples of spatial_merge_size.
        config: Configuration of the vision encoder.
    """
    merge = config.spatial_merge_size
    window = config.window_size // config.patch_size // merge
    positions = [_positions(grid, merge) for grid in grids]
    full = [height * width for time, height, width in grids for _ in range(time)]
    learned = _interpolation(grids, positions, config)
    if not config.windowed:
        whole = Segments(tuple(full))
        return PatchOrder(None, None, whole, whole, torch.from_numpy(np.concatenate(positions)), *learned)
    orders: list[np.ndarray] = []
    lengths: list[int] = []
    first_block = 0
    for grid in grids:
        order, window_lengths = _windows(grid, merge, window)
        orders.append(order + first_block)
        lengths.extend(window_lengths)
        first_block += len(order)
    order = np.concatenate(orders)

    def ordered(values: np.ndarray) -> Tensor:
        by_block = values.reshape(-1, merge**2, values.shape[-1])[order]
        return torch.from_numpy(by_block.reshape(values.shape))

    return PatchOrder(
        order=torch.from_numpy(order),
        restore=torch.from_numpy(np.argsort(order)),
        full=Segments(tuple(full)),
        windows=Segments(tuple(lengths)),
        positions=ordered(np.concatenate(positions)),
        rows=None if learned[0] is None else ordered(learned[0].numpy()),
        row_weights=None if learned[1] is None else ordered(learned[1].numpy()),
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


def _interpolation(
    grids: Sequence[Grid], positions: Sequence[np.ndarray], config: VisionConfig
) -> tuple[Tensor | None, Tensor | None]:
    """Rows of the position embedding [P, 4] and their bilinear weights [P, 4]; the corners of both grids coincide."""
    if not config.num_position_embeddings:
        return None, None
    side = isqrt(config.num_position_embeddings)
    sizes = np.concatenate([np.tile(grid[1:], (len(one), 1)) for grid, one in zip(grids, positions, strict=True)])
    # The arithmetic of transformers in float32, so that the weights are equal.
    place = np.concatenate(positions).astype(np.float32) * np.float32(side - 1)
    place = place / np.maximum(sizes - 1, 1).astype(np.float32)
    low = np.floor(place)
    corners = np.stack((low, low + 1), axis=-1)  # [P, 2, 2]: axis, below and above
    weights = np.maximum(1 - np.abs(place[:, :, None] - corners), 0)
    corners = np.clip(corners.astype(np.int64), 0, side - 1)
    rows = corners[:, 0, :, None] * side + corners[:, 1, None, :]
    combined = weights[:, 0, :, None] * weights[:, 1, None, :]
    return torch.from_numpy(rows.reshape(-1, 4)), torch.from_numpy(combined.reshape(-1, 4))


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
