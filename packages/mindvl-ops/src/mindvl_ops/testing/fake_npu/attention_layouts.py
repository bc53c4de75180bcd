# SPDX-License-Identifier: Apache-2.0
"""Five layouts, one inner form: a list of sequences, each with heads first. Used by the attention operators alone."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BATCHED = ("BSH", "SBH", "BNSD", "BSND")
LAYOUTS = (*BATCHED, "TND")


@dataclass(frozen=True)
class Shapes:
    """Sizes of a call, whatever its layout."""

    layout: str
    num_heads: int
    num_kv_heads: int
    query_lengths: tuple[int, ...]  # per sequence
    kv_lengths: tuple[int, ...]
    head_size: int
    value_size: int

    @property
    def numels(self) -> int:
        """Entries of all score matrices together."""
        pairs = zip(self.query_lengths, self.kv_lengths, strict=True)
        return self.num_heads * sum(rows * columns for rows, columns in pairs)


def lengths_of(ends: Any) -> tuple[int, ...]:
    """Cumulative ends without a leading 0 -> lengths; a 0 after the first sequence drops it and all that follow."""
    lengths, before = [], 0
    for end in [int(end) for end in ends]:
        if end == 0 and before > 0:
            break
        lengths.append(end - before)
        before = end
    return tuple(lengths)


def shapes_of(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, layout: str, query_ends: Any, kv_ends: Any
) -> Shapes:
    """Sizes of a call that the rules let pass."""
    heads_first = heads_of(query, layout, head_num)
    head_size = query.shape[-1] // (head_num if layout in ("BSH", "SBH") else 1)
    kv_heads = key.shape[-1] // head_size if layout in ("BSH", "SBH") else heads_of(key, layout, head_num)
    value_size = value.shape[-1] // (kv_heads if layout in ("BSH", "SBH") else 1)
    if layout == "TND":
        lengths = lengths_of(query_ends), lengths_of(kv_ends)
    else:
        batch = query.shape[layout.index("B")]
        rows, columns = (tensor.shape[layout.index("S")] for tensor in (query, key))
        lengths = (rows,) * batch, (columns,) * batch
    return Shapes(layout, heads_first, kv_heads, *lengths, head_size, value_size)


def heads_of(tensor: Tensor, layout: str, head_num: int) -> int:
    """Number of heads; BSH and SBH do not show it."""
    return tensor.shape[layout.index("N")] if "N" in layout else head_num


def sequences(tensor: Tensor, layout: str, heads: int, lengths: tuple[int, ...]) -> list[Tensor]:
    """Every sequence as `[N, S, D]` float32."""
    wide = tensor.float()
    if layout == "TND":
        return [part.transpose(0, 1) for part in wide[: sum(lengths)].split(list(lengths))]
    if layout == "BNSD":
        return list(wide)
    if layout in ("BSH", "SBH"):
        wide = wide.unflatten(-1, (heads, -1))
    if layout == "SBH":
        wide = wide.transpose(0, 1)
    return list(wide.transpose(1, 2))


def joined(parts: list[Tensor], layout: str, total: int) -> Tensor:
    """The way back from `sequences`; TND: rows after the last sequence are 0."""
    if layout == "TND":
        rows = torch.cat([part.transpose(0, 1) for part in parts])
        rest = rows.new_zeros(total - len(rows), *rows.shape[1:])
        return torch.cat((rows, rest))
    stacked = torch.stack(parts)  # [B, N, S, D]
    if layout == "BNSD":
        return stacked
    stacked = stacked.transpose(1, 2)  # [B, S, N, D]
    if layout == "BSND":
        return stacked
    stacked = stacked.flatten(2)
    return stacked.transpose(0, 1) if layout == "SBH" else stacked


def statistics(parts: list[Tensor], layout: str, softmax_layout: str, total: int) -> Tensor:
    """`[N, S]` of every sequence -> 8 equal columns, `[B, N, S, 8]` or `[T, N, 8]`.

    The memory of the packed form runs head by head unless softmax_layout is TND, whatever its shape says.
    """
    if layout != "TND":
        return torch.stack(parts)[..., None].repeat(1, 1, 1, 8)
    rows = torch.cat(parts, dim=1)  # [N, T]
    rows = torch.cat((rows, rows.new_zeros(len(rows), total - rows.shape[1])), dim=1)
    if softmax_layout == "TND":
        return rows.T[..., None].repeat(1, 1, 8)
    return rows[..., None].repeat(1, 1, 8).view(total, len(rows), 8)


def from_statistics(packed: Tensor, layout: str, softmax_layout: str, lengths: tuple[int, ...]) -> list[Tensor]:
    """The way back from `statistics`: `[N, S]` of every sequence."""
    if layout != "TND":
        return list(packed[..., 0])
    total, heads = packed.shape[:2]
    rows = packed[..., 0].T if softmax_layout == "TND" else packed.reshape(heads, total, 8)[..., 0]
    return list(rows[:, : sum(lengths)].split(list(lengths), dim=1))
