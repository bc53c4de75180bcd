# SPDX-License-Identifier: Apache-2.0
"""Context parallel inside attention: from a slice of the pack with all heads to the whole pack with some, and back.

Comes around the operator in spec.py. Each rank then sees whole segments, so packed packs are computed as one process
does. Source: DeepSpeed-Ulysses (arXiv 2309.14509).
"""

from math import lcm

import torch
from megatron.core.tensor_parallel.mappings import all_to_all
from torch import Tensor
from torch.distributed import ProcessGroup


def to_whole_pack(query: Tensor, key: Tensor, value: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """[T/cp, N, D], [T/cp, Nkv, D], [T/cp, Nkv, Dv] -> the whole pack and a cp-th of the heads, in one exchange.

    Key-value heads that cannot be dealt out evenly are repeated first, each beside itself, so that every rank has those
    which its query heads look at; the gradients of the copies are added up.
    """
    size = group.size()
    repeats = lcm(key.shape[1], size) // key.shape[1]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    given = (query, key, value)
    # [T/cp, cp, W] with W the values that go to one rank, of all three.
    parts = torch.cat([heads.reshape(len(heads), size, -1) for heads in given], dim=-1)
    received: Tensor = all_to_all(group, parts.transpose(0, 1).contiguous())
    widths = [heads[0].numel() // size for heads in given]
    pieces = received.flatten(0, 1).split(widths, dim=-1)
    query, key, value = (
        piece.reshape(len(piece), -1, heads.shape[-1]) for piece, heads in zip(pieces, given, strict=True)
    )
    return query, key, value


def to_own_slice(context: Tensor, group: ProcessGroup) -> Tensor:
    """[T, N/cp, D] of the whole pack -> [T/cp, N, D] of this rank's slice."""
    size, width = group.size(), context.shape[-1]
    received: Tensor = all_to_all(group, context.reshape(size, len(context) // size, -1))
    return received.transpose(0, 1).reshape(len(context) // size, -1, width)
