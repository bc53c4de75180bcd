# SPDX-License-Identifier: Apache-2.0
"""Weighted average of weights. Source: Wortsman et al., "Model soups", 2022; the paper's section on model merging."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def average(tensors: Iterable[Tensor], weights: Sequence[float]) -> Tensor:
    """Weighted sum in float64, one tensor at a time; the result stays float64 and is rounded once, by the caller.

    float64 has room for the sum of equal weights of one value to round back to that value, so that merging copies of
    one float32 or 16-bit model gives the model itself, bit for bit.
    """
    total: Tensor | None = None
    for tensor, weight in zip(tensors, weights, strict=True):
        if total is None:
            total = tensor.to(torch.float64, copy=True).mul_(weight)
        else:
            total.add_(tensor.to(torch.float64), alpha=weight)
    assert total is not None
    return total
