# SPDX-License-Identifier: Apache-2.0
"""Weighted average of weights. Source: Wortsman et al., "Model soups", 2022; the paper's section on model merging."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def average(tensors: Iterable[Tensor], weights: Sequence[float]) -> Tensor:
    """Weighted sum in float64, one tensor at a time; the caller rounds the float64 result once.

    float64 is precise enough that merging copies of one float32 or 16-bit model with equal weights gives a bitwise
    identical model.
    """
    total: Tensor | None = None
    for tensor, weight in zip(tensors, weights, strict=True):
        if total is None:
            total = tensor.to(torch.float64, copy=True).mul_(weight)
        else:
            total.add_(tensor.to(torch.float64), alpha=weight)
    assert total is not None
    return total
