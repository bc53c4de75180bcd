# SPDX-License-Identifier: Apache-2.0
"""SwiGLU, scaled masked softmax, GELU: float32 inside, one rounding."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .operators import operator
from .state import refuse, strict

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
MASKED = -10000.0  # what the softmax kernel puts at masked places: a row without a kept place comes out uniform


def check_float(op: str, name: str, tensor: Tensor) -> None:
    """The three types that every kernel here takes."""
    refuse(tensor.dtype not in _FLOATS, f"{op}: {name} is {tensor.dtype}, supported are float16, bfloat16, float32")


def _swiglu_rules(input: Tensor, dim: int, **_: Any) -> None:
    op = "npu_swiglu"
    check_float(op, "input", input)
    refuse(not 1 <= input.dim() <= 8, f"{op}: input has rank {input.dim()}, supported is 1 to 8")
    refuse(not -input.dim() <= dim < input.dim(), f"{op}: dim {dim} is no axis of {list(input.shape)}")
    refuse(input.shape[dim] % 2 != 0, f"{op}: size {input.shape[dim]} of axis {dim} is odd")
    refuse(not input.is_contiguous(), f"{op}: input is not contiguous, strides {list(input.stride())}")
    refuse(input.numel() == 0 and strict().documented_limits, f"{op}: input {list(input.shape)} is empty")


@operator("npu_swiglu", rules=_swiglu_rules, learns=("input",))
def swiglu(input: Tensor, dim: int) -> Tensor:
    """silu(first half) * second half along `dim`."""
    gate, up = input.float().chunk(2, dim=dim)
    return (F.silu(gate) * up).to(input.dtype)


def _swiglu_backward_rules(grad_output: Tensor, input: Tensor, dim: int) -> None:
    _swiglu_rules(input, dim)
    refuse(
        list(grad_output.shape) != list(input.chunk(2, dim=dim)[0].shape) or not grad_output.is_contiguous(),
        f"npu_swiglu_backward: grad_output {list(grad_output.shape)} must be contiguous, half of {list(input.shape)}",
    )


@operator("npu_swiglu_backward", rules=_swiglu_backward_rules)
def swiglu_backward(grad_output: Tensor, input: Tensor, dim: int) -> Tensor:
    """Gradient of the whole input."""
    gate, up = input.float().chunk(2, dim=dim)
    grad, sigmoid = grad_output.float(), gate.sigmoid()
    dgate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat((dgate, grad * gate * sigmoid), dim=dim).to(input.dtype)


def _softmax_rules(x: Tensor, mask: Tensor, fixed_triu_mask: bool, **_: Any) -> None:
    op = "npu_scaled_masked_softmax"
    check_float(op, "x", x)
    refuse(x.dim() != 4, f"{op}: x has rank {x.dim()}, must be [B, N, S1, S2]")
    refuse(mask.dtype != torch.bool, f"{op}: mask is {mask.dtype}, must be bool")
    allowed = mask.dim() == 4 and mask.shape[2:] == x.shape[2:]
    allowed = allowed and mask.shape[0] in (1, x.shape[0]) and mask.shape[1] in (1, x.shape[1])
    refuse(not allowed, f"{op}: mask {list(mask.shape)} does not fit x {list(x.shape)}")
    refuse(fixed_triu_mask and strict().reserved_arguments, f"{op}: fixed_triu_mask is reserved, must be False")
    rows, columns = x.shape[2:]
    refuse(not 0 < columns <= 4096, f"{op}: last axis {columns} is outside 1 to 4096")
    refuse(
        strict().documented_limits and (rows % 32 != 0 or columns % 32 != 0 or not 32 <= rows <= 4096),
        f"{op}: sizes {rows} x {columns} must be multiples of 32 from 32 to 4096",
    )


@operator("npu_scaled_masked_softmax", rules=_softmax_rules, learns=("x",))
def scaled_masked_softmax(x: Tensor, mask: Tensor, scale: float, fixed_triu_mask: bool) -> Tensor:
    """Softmax of `x * scale` over the last axis, masked places at -10000."""
    if fixed_triu_mask:
        mask = torch.ones(x.shape[2:], dtype=torch.bool, device=x.device).triu(1)
    return (x.float() * scale).masked_fill(mask, MASKED).softmax(dim=-1).to(x.dtype)


@operator("npu_scaled_masked_softmax_backward")
def scaled_masked_softmax_backward(
    y_grad: Tensor, y: Tensor, mask: Tensor, scale: float, fixed_triu_mask: bool
) -> Tensor:
    """Gradient of x; masked places get none."""
    grad, wide = y_grad.float(), y.float()
    if fixed_triu_mask:
        mask = torch.ones(y.shape[2:], dtype=torch.bool, device=y.device).triu(1)
    inner = wide * (grad - (grad * wide).sum(dim=-1, keepdim=True))
    return (inner * scale).masked_fill(mask, 0.0).to(y.dtype)


def _gelu_rules(input: Tensor, approximate: str) -> None:
    check_float("npu_gelu", "input", input)
    refuse(approximate not in ("none", "tanh"), f"npu_gelu: approximate {approximate!r} is neither none nor tanh")


@operator("npu_gelu", rules=_gelu_rules, learns=("input",))
def gelu(input: Tensor, approximate: str) -> Tensor:
    """GELU, exact or with tanh."""
    return F.gelu(input.float(), approximate=approximate).to(input.dtype)


@operator("fast_gelu", rules=lambda input: check_float("fast_gelu", "input", input), learns=("input",))
def fast_gelu(input: Tensor) -> Tensor:
    """x * sigmoid(1.702 x)."""
    wide = input.float()
    return (wide * torch.sigmoid(1.702 * wide)).to(input.dtype)


@operator("npu_gelu_mul", rules=_gelu_rules)
def gelu_mul(input: Tensor, approximate: str) -> Tensor:
    """GELU of the first half of the last axis times the second; no derivative."""
    first, second = input.float().chunk(2, dim=-1)
    return (F.gelu(first, approximate=approximate) * second).to(input.dtype)
