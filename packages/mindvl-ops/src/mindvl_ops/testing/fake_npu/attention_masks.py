# SPDX-License-Identifier: Apache-2.0
"""Which pairs each sparse mode keeps, and what its mask must hold.

i is the query row, j the key column, off = Skv - Sq of the sequence; True in a mask is masked out.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .attention_layouts import Shapes
from .state import refuse, strict

COMPRESSED = (2, 3, 4, 7, 8)
SIDE = 2048


@dataclass(frozen=True)
class Sparsity:
    """The arguments that decide which pairs are kept."""

    mode: int
    mask: Tensor | None
    pre: int
    following: int
    prefix: tuple[int, ...] | None


def compressed_mask(mode: int, device: torch.device | None = None) -> Tensor:
    """What the compressed modes expect as atten_mask: `[2048, 2048]`, mode 6 `[3072, 2048]`; bool."""
    square = torch.ones(SIDE, SIDE, dtype=torch.bool, device=device).triu(1)
    if mode != 6:
        return square
    block = torch.zeros(SIDE // 2, SIDE, dtype=torch.bool, device=device)
    block[:, SIDE // 2 :] = True
    return torch.cat((square, block))


def kept(shapes: Shapes, sparsity: Sparsity) -> list[Tensor] | None:
    """`[N or 1, Sq, Skv]` bool of every sequence, True = may attend; None: all pairs."""
    if sparsity.mask is None:
        return None
    return [_kept_in(index, shapes, sparsity) for index in range(len(shapes.query_lengths))]


def _kept_in(index: int, shapes: Shapes, sparsity: Sparsity) -> Tensor:
    rows, columns = shapes.query_lengths[index], shapes.kv_lengths[index]
    mode, assumed = sparsity.mode, sparsity.mask
    assert assumed is not None
    i, j = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    off = columns - rows
    if mode in (0, 1):
        keep = ~_full_mask(index, shapes, assumed).bool()
        return keep & ((i - sparsity.pre <= j) & (j <= i + sparsity.following)) if mode == 0 else keep
    if mode == 5:
        return ~_full_mask(index, shapes, assumed).bool()
    if mode == 6:
        assert sparsity.prefix is not None
        return ((j <= i + off) | (j < sparsity.prefix[index]))[None]
    band = (i + off - sparsity.pre <= j) & (j <= i + off + sparsity.following)
    if mode == 4 or index == _band_sequence(shapes, mode):
        return band[None]
    return ((j <= i + off) if mode in (3, 7) else (j <= i).expand(rows, columns))[None]


def _band_sequence(shapes: Shapes, mode: int) -> int | None:
    """Mode 7: the last sequence that is not empty is a band; mode 8: the first."""
    if mode not in (7, 8):
        return None
    filled = [index for index, length in enumerate(shapes.query_lengths) if length]
    if not filled:
        return None
    return filled[-1] if mode == 7 else filled[0]


def _full_mask(index: int, shapes: Shapes, mask: Tensor) -> Tensor:
    """The part of a full mask that belongs to one sequence, `[N or 1, Sq, Skv]`."""
    rows, columns = shapes.query_lengths[index], shapes.kv_lengths[index]
    if mask.dim() == 4:
        return mask[min(index, len(mask) - 1)]
    if shapes.layout == "TND" and _is_total(shapes, mask):
        top, left = sum(shapes.query_lengths[:index]), sum(shapes.kv_lengths[:index])
        return mask[None, top : top + rows, left : left + columns]
    return mask[None, :rows, :columns]


def _is_total(shapes: Shapes, mask: Tensor) -> bool:
    """TND: [sum Sq, sum Skv] instead of [max Sq, max Skv]."""
    several = len(shapes.query_lengths) > 1
    return several and tuple(mask.shape) == (sum(shapes.query_lengths), sum(shapes.kv_lengths))


def check_shape(op: str, shapes: Shapes, sparsity: Sparsity) -> None:
    """Type and shape of the mask for its mode."""
    mask, mode = sparsity.mask, sparsity.mode
    if mask is None:
        return
    refuse(mask.dtype not in (torch.bool, torch.uint8), f"{op}: atten_mask is {mask.dtype}, must be bool or uint8")
    shape = tuple(mask.shape)
    if mode in COMPRESSED:
        refuse(shape != (SIDE, SIDE), f"{op}: sparse_mode {mode} needs atten_mask [2048, 2048], got {list(shape)}")
        return
    if mode == 6:
        refuse(shape != (3072, SIDE), f"{op}: sparse_mode 6 needs atten_mask [3072, 2048], got {list(shape)}")
        return
    allowed: set[tuple[int, ...]]
    if shapes.layout == "TND":
        allowed = {(max(shapes.query_lengths), max(shapes.kv_lengths))}
        allowed.add((sum(shapes.query_lengths), sum(shapes.kv_lengths)))
    else:
        batch, heads = len(shapes.query_lengths), shapes.num_heads
        rows, columns = shapes.query_lengths[0], shapes.kv_lengths[0]
        allowed = {(batch, heads, rows, columns), (batch, 1, rows, columns)}
        if mode != 5:
            allowed |= {(1, 1, rows, columns), (rows, columns)}
    refuse(shape not in allowed, f"{op}: atten_mask {list(shape)} must be one of {sorted(map(list, allowed))}")


def check_content(op: str, shapes: Shapes, sparsity: Sparsity) -> None:
    """Refuse what the hardware would silently compute wrongly."""
    mask, mode, flags = sparsity.mask, sparsity.mode, strict()
    if mask is None:
        return
    if flags.mask_content and (mode in COMPRESSED or mode == 6):
        wrong = not torch.equal(mask.bool(), compressed_mask(mode, mask.device))
        refuse(wrong, f"{op}: atten_mask of sparse_mode {mode} must be triu(ones, diagonal=1), 1 = masked out")
    keeps = kept(shapes, sparsity) or []
    for index, (rows, columns) in enumerate(zip(shapes.query_lengths, shapes.kv_lengths, strict=True)):
        if mode == 0 and flags.mask_window:
            lost = bool((~_full_mask(index, shapes, mask).bool() & ~keeps[index]).any().item())
            refuse(lost, f"{op}: sequence {index}: pre/next tokens skip pairs that atten_mask keeps")
        if mode == 5 and flags.mask_content and sparsity.prefix is not None:
            i, j = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
            wanted = (j <= i + columns - rows) | (j < sparsity.prefix[index])
            wrong = bool((keeps[index] != wanted).any().item())
            refuse(wrong, f"{op}: batch {index}: atten_mask of sparse_mode 5 does not agree with prefix")
        if shapes.layout == "TND" and flags.masked_row and keeps[index].numel():
            empty = bool((~keeps[index].any(dim=-1)).any().item())
            refuse(empty, f"{op}: sequence {index}: a row of the mask is all True, undefined in TND")
