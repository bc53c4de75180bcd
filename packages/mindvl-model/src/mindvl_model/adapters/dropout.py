# SPDX-License-Identifier: Apache-2.0
"""Dropout masks that are functions of position, so that they are the same in every parallel layout.

The mask of an element depends on step, content and position of its token (or patch) in the pack, name of the layer, and
column, by an integer hash (lowbias32 of Chris Wellons' hash-prospector). A rank that has some rows or columns computes
just those, and a recomputed pass gets the mask of the first. Used by megatron/lora.py.
"""

import hashlib

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF


def layer_key(name: str) -> int:
    """Key of a layer from its name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")


def pack_key(input_ids: Tensor, pad: int, step: int) -> Tensor:
    """Key of a pack [1] int64 from its tokens [T]; padding by `pad` at the end does not change it."""
    positions = mixed(torch.arange(1, len(input_ids) + 1, device=input_ids.device))
    summed = ((input_ids.long() - pad) * positions).sum()
    return mixed(summed + step * 0x9E3779B1)[None]


def row_keys(key: Tensor, positions: Tensor) -> Tensor:
    """Keys [S] int64 of the rows at these positions [S] of a pack."""
    return mixed(mixed(positions) + key)


def keep_mask(rows: Tensor, layer: int, first: int, count: int, rate: float) -> Tensor:
    """Which elements are kept, bool [S, count], of the columns from `first` on; each with probability 1 - rate.

    Args:
        rows: [S] int64, keys of the rows.
        layer: Key of the layer.
        first: First column.
        count: Number of columns.
        rate: Probability of dropping an element, in steps of 2**-32.
    """
    columns = mixed(torch.arange(first, first + count, device=rows.device) + layer)
    return mixed(rows[:, None] + columns) >= round(rate * 2**32)


def mixed(values: Tensor) -> Tensor:
    """A hash of the low 32 bits of int64 values, in [0, 2**32)."""
    values = values & _LOW
    values ^= values >> 16
    values *= 0x7FEB352D
    values &= _LOW
    values ^= values >> 15
    values *= 0x846CA68B
    values &= _LOW
    values ^= values >> 16
    return values
