# SPDX-License-Identifier: Apache-2.0
"""RMSNorm: contract and reference. Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019."""

import torch
from torch import Tensor

from .backend import chosen
from .precision import compute_dtype
from .registry import register


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis.

    Computed in float32 with one rounding at the end (the published transformers code rounds before the weight, which
    differs in the last bit in 16 bit).

    Args:
        x: `[..., H]`.
        weight: `[H]`.
    """
    result: Tensor = chosen("rms_norm")(x, weight, eps)
    return result


@register("rms_norm", "reference")
def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The formula as written."""
    dtype = compute_dtype(x)
    wide = x.to(dtype)
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * weight.to(dtype)).to(x.dtype)
