# SPDX-License-Identifier: Apache-2.0
"""RMSNorm family. Everything in float32 with one rounding, except add-RMSNorm, which rounds before the weight too."""

from typing import Any

import torch
from torch import Tensor

from .operators import operator
from .state import refuse, strict

_PAIRS = {  # (input, gamma)
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float32),
}


def _rms_norm_rules(input: Tensor, gamma: Tensor, **_: Any) -> None:
    op = "npu_rms_norm"
    _check_gamma(op, input, gamma)
    refuse(
        (input.dtype, gamma.dtype) not in _PAIRS,
        f"{op}: input {input.dtype} with gamma {gamma.dtype} is no supported pair of types",
    )


def _check_gamma(op: str, input: Tensor, gamma: Tensor) -> None:
    lowest = 2 if strict().documented_limits else 1
    refuse(not lowest <= input.dim() <= 8, f"{op}: input has rank {input.dim()}, supported is {lowest} to 8")
    refuse(
        gamma.dim() == 0 or tuple(gamma.shape) != tuple(input.shape[-gamma.dim() :]),
        f"{op}: gamma {list(gamma.shape)} is not the end of the shape of input {list(input.shape)}",
    )


@operator("npu_rms_norm", rules=_rms_norm_rules, learns=("input", "gamma"))
def rms_norm(input: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """(y in the type of input, rstd float32 with the normalised axes kept as 1)."""
    wide = input.float()
    axes = list(range(-gamma.dim(), 0))
    rstd = torch.rsqrt(wide.square().mean(dim=axes, keepdim=True) + epsilon)
    return (wide * rstd * gamma.float()).to(input.dtype), rstd


def _backward_rules(dy: Tensor, input: Tensor, gamma: Tensor, rstd: Tensor) -> None:
    op = "npu_rms_norm_backward"
    _rms_norm_rules(input, gamma)
    refuse(dy.shape != input.shape, f"{op}: dy {list(dy.shape)} has another shape than input {list(input.shape)}")
    expected = [*input.shape[: -gamma.dim()], *[1] * gamma.dim()]
    refuse(
        rstd.dtype != torch.float32 or list(rstd.shape) != expected,
        f"{op}: rstd must be float32 {expected}, got {rstd.dtype} {list(rstd.shape)}",
    )


@operator("npu_rms_norm_backward", rules=_backward_rules)
def rms_norm_backward(dy: Tensor, input: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """(dx in the type of input, dgamma float32)."""
    axes = list(range(-gamma.dim(), 0))
    normed = input.float() * rstd
    weighted = dy.float() * gamma.float()
    dx = rstd * (weighted - normed * (weighted * normed).mean(dim=axes, keepdim=True))
    dgamma = (dy.float() * normed).flatten(0, input.dim() - gamma.dim() - 1) if input.dim() > gamma.dim() else None
    return dx.to(input.dtype), dy.float() * normed if dgamma is None else dgamma.sum(dim=0)


def _add_rules(x1: Tensor, x2: Tensor, gamma: Tensor, **_: Any) -> None:
    op = "npu_add_rms_norm"
    types = {x1.dtype, x2.dtype, gamma.dtype}
    refuse(
        len(types) > 1 or not types <= {torch.float16, torch.bfloat16, torch.float32},
        f"{op}: x1, x2 and gamma must have one type, got {x1.dtype}, {x2.dtype}, {gamma.dtype}",
    )
    refuse(x1.shape != x2.shape, f"{op}: x1 {list(x1.shape)} and x2 {list(x2.shape)} differ in shape")
    _check_gamma(op, x1, gamma)


@operator("npu_add_rms_norm", rules=_add_rules, derivative="raises")
def add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """(y, rstd float32, x1 + x2): not bit-equal to npu_rms_norm of the sum."""
    total = (x1 + x2).float() if x1.dtype == torch.float16 else x1.float() + x2.float()
    axes = list(range(-gamma.dim(), 0))
    rstd = torch.rsqrt(total.square().mean(dim=axes, keepdim=True) + epsilon)  # of the sum before rounding
    y = (total * rstd).to(x1.dtype) * gamma
    return y, rstd, total.to(x1.dtype)
