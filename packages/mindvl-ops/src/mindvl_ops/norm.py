# SPDX-License-Identifier: Apache-2.0
"""RMSNorm, alone or after a residual sum: contracts and references.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
"""

import torch
from torch import Tensor

from .backend import chosen
from .cases import Case, Inputs, case_of, joined
from .errors import OpsError
from .precision import compute_dtype
from .registry import register


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis.

    Computed in float32 with one rounding at the end (the published transformers code rounds before the weight, which
    differs in the last bit in 16 bit).

    Args:
        x: `[..., H]`.
        weight: `[H]`.

    Raises:
        OpsError: `weight` is not `[H]`.
    """
    _check_weight("rms_norm", x, weight)
    result: Tensor = chosen("rms_norm")(x, weight, eps)
    return result


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`total = x + residual`, and the RMSNorm of it.

    Two roundings, one for each result; the norm is taken of the rounded total, so that it equals the two operators one
    after the other in every backend.

    Args:
        x, residual: `[..., H]`, one type.
        weight: `[H]`.

    Returns:
        The normed total and the total, both in the type of `x`.

    Raises:
        OpsError: Shapes or types that do not agree.
    """
    _check_weight("add_rms_norm", x, weight)
    if x.shape != residual.shape or x.dtype != residual.dtype:
        raise OpsError(
            f"add_rms_norm: x, residual: {list(x.shape)} {x.dtype} and {list(residual.shape)} {residual.dtype} cannot "
            "be added. Give one shape and one type."
        )
    result: tuple[Tensor, Tensor] = chosen("add_rms_norm")(x, residual, weight, eps)
    return result


def _check_weight(operator: str, x: Tensor, weight: Tensor) -> None:
    if x.dim() < 1 or weight.shape != x.shape[-1:]:
        raise OpsError(
            f"{operator}: weight has shape {list(weight.shape)}, x {list(x.shape)}. Give x [..., H] and weight [H]."
        )


@register("rms_norm", "reference")
def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The formula as written."""
    dtype = compute_dtype(x)
    wide = x.to(dtype)
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * weight.to(dtype)).to(x.dtype)


@register("add_rms_norm", "reference")
def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum, then the norm."""
    total = x + residual
    return rms_norm_reference(total, weight, eps), total


@case_of("rms_norm")
def _rms_norm_case(inputs: Inputs) -> Case:
    width = 4 * inputs.tokens
    return Case(lambda x, w: rms_norm(x, w, 1e-6), (inputs.normal(inputs.tokens, width), inputs.normal(width)))


@case_of("add_rms_norm")
def _add_rms_norm_case(inputs: Inputs) -> Case:
    shape = (inputs.tokens, 4 * inputs.tokens)
    tensors = (inputs.normal(*shape), inputs.normal(*shape), inputs.normal(shape[1]))
    return Case(lambda x, y, w: joined(add_rms_norm(x, y, w, 1e-6)), tensors)
