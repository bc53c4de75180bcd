# SPDX-License-Identifier: Apache-2.0
"""Context parallelism in attention: all-to-all from a slice of the pack with all heads to the whole pack with some.

Used around the attention operator in spec.py. Each rank has whole segments, so the computation per segment is that of a
single process. Source: DeepSpeed-Ulysses (arXiv 2309.14509).
"""

from math import lcm

import torch
from megatron.core.tensor_parallel.mappings import all_to_all
from torch import Tensor
from torch.distributed import ProcessGroup


def to_whole_pack(query: Tensor, key: Tensor, value: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """[T/cp, N, D], [T/cp, Nkv, D], [T/cp, Nkv, Dv] -> [T, N/cp, D], ... of the whole pack, in one all-to-all.

    If cp_size does not divide the number of key-value heads, each head is repeated first, so that every rank has the
    key-value heads of its query heads; the gradients of the copies are summed.
    """
    size = group.size()
    repeats = lcm(key.shape[1], size) // key.shape[1]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    inputs = (query, key, value)
    # [T/cp, cp, W], where W is the number of query, key and value elements sent to one rank.
    parts = torch.cat([heads.reshape(len(heads), size, -1) for heads in inputs], dim=-1)
    received: Tensor = all_to_all(group, parts.transpose(0, 1).contiguous())
    widths = [heads[0].numel() // size for heads in inputs]
    pieces = received.flatten(0, 1).split(widths, dim=-1)
    query, key, value = (
        piece.reshape(len(piece), -1, heads.shape[-1]) for piece, heads in zip(pieces, inputs, strict=True)
    )
    return query, key, value


def to_own_slice(context: Tensor, group: ProcessGroup) -> Tensor:
    """[T, N/cp, D] of the whole pack -> [T/cp, N, D] of this rank's slice, by all-to-all."""
    size, width = group.size(), context.shape[-1]
    received: Tensor = all_to_all(group, context.reshape(size, len(context) // size, -1))
    return received.transpose(0, 1).reshape(len(context) // size, -1, width)
