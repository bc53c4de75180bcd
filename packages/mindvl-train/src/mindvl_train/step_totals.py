# SPDX-License-Identifier: Apache-2.0
"""Totals of a step over all ranks: gradient norm, loss, loss tokens, overflows and stop requests, in one message.

Comes between backward and update. The host waits for the device once in a step, here. The sums are float32, as before
they were combined; a number of loss tokens is exact up to 2^24. Not part of this message: the number of loss tokens
that divides the gradients, because the norm is that of the divided gradients, and the counts of the routers, which are
summed over fewer ranks. There is no flag for infinite gradients: only a loss scale (fp16) needs one, and bf16 and fp32
have none; an infinite gradient makes the norm infinite or NaN.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """Sums over all ranks, the same on every rank."""

    grad_norm: float  # before clipping
    loss_sum: float
    num_loss_tokens: int
    overflowed: bool  # whether rows did not fit into a message to their experts on a rank: the step is invalid
    stop: bool  # whether a rank requested to stop the run after this step


@torch.no_grad()
def reduce_totals(
    squared_norm: Tensor, loss_sum: Tensor, num_loss_tokens: int, *, stop: bool, overflow: Tensor | None = None
) -> StepTotals:
    """Sum the values of this rank over all ranks; collective, one all-reduce of five numbers and one host wait.

    Args:
        squared_norm: Sum of squares of this rank's share of the gradients, float32 scalar on the device.
        loss_sum: Loss of this rank, scalar on the device; each part of the loss is given by one rank.
        num_loss_tokens: Loss tokens of this rank; each pack is counted by one rank.
        stop: Whether this rank requests a stop.
        overflow: Whether rows did not fit on this rank, scalar on the device; None: there was nothing to overflow.
    """
    # `full` is filled on the device; torch.tensor would be a blocking copy from the host.
    tokens, stops = (torch.full_like(squared_norm, float(value)) for value in (num_loss_tokens, stop))
    overflows = torch.zeros_like(squared_norm) if overflow is None else overflow.to(squared_norm.dtype)
    totals = torch.stack((squared_norm, loss_sum.detach().to(squared_norm.dtype), tokens, overflows, stops))
    dist.all_reduce(totals)
    square, loss, loss_tokens, num_overflows, num_stops = totals.tolist()
    return StepTotals(
        grad_norm=square**0.5,
        loss_sum=loss,
        num_loss_tokens=int(loss_tokens),
        overflowed=num_overflows > 0,
        stop=num_stops > 0,
    )
