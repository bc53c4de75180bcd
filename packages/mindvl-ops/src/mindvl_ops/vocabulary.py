# SPDX-License-Identifier: Apache-2.0
"""A piece of the vocabulary on this rank, and how ranks exchange what a loss needs of the other pieces.

Tensor parallelism cuts the output layer over the vocabulary: each rank holds `[T, V/tp]` logits. The loss needs two
exchanges of `[T]`-sized tensors: a maximum, then a sum.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .errors import OpsError

Exchange = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class VocabularyShard:
    """Which ids this rank holds, and the two exchanges.

    Args:
        start: First id of this rank; labels are ids of the whole vocabulary.
        maximum: `[...]` -> the largest value over all ranks, elementwise.
        total: `[...]` -> the sum over all ranks, elementwise.
    """

    start: int
    maximum: Exchange
    total: Exchange

    @classmethod
    def of_group(cls, local_size: int, group: Any = None) -> "VocabularyShard":
        """Equal pieces in the order of the ranks of a process group (the whole world if not given)."""
        from torch.distributed import ReduceOp, all_reduce, get_rank

        def maximum(x: Tensor) -> Tensor:
            x = x.clone()
            all_reduce(x, op=ReduceOp.MAX, group=group)
            return x

        def total(x: Tensor) -> Tensor:
            x = x.clone()
            all_reduce(x, op=ReduceOp.SUM, group=group)
            return x

        return cls(get_rank(group) * local_size, maximum, total)


def _same(x: Tensor) -> Tensor:
    return x


WHOLE = VocabularyShard(0, _same, _same)


def local_target(labels: Tensor, start: int, size: int) -> tuple[Tensor, Tensor]:
    """Column of each label among the `size` ids from `start` on (0 where it is elsewhere), and whether it is here."""
    here = (labels >= start) & (labels < start + size)
    return torch.where(here, labels - start, 0), here


class SumOverRanks(torch.autograd.Function):
    """The sum over all ranks; every rank computes the same loss from it, so its gradient passes as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: VocabularyShard) -> Tensor:
        ctx.is_sharded = shard is not WHOLE
        return shard.total(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.is_sharded and torch.is_grad_enabled():  # create_graph=True: the next derivative needs an exchange
            raise OpsError(
                "vocabulary.SumOverRanks: second derivative (create_graph=True) of a loss over a sharded vocabulary. "
                "Gather the logits of all ranks first, or use tensor-parallel size 1."
            )
        return grad, None
