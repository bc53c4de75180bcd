# SPDX-License-Identifier: Apache-2.0
"""RMSNorm, rotary, SwiGLU and masked softmax with few memory passes and one autograd node each."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..masked_softmax import BLOCKED_LOGIT
from ..norm import rms_norm_reference
from ..precision import compute_dtype
from ..registry import register
from ..rotary_qkv import HeadNorms, Heads, one_after_the_other
from ..swiglu import swiglu_reference
from .derivatives import gradients_of_reference, is_differentiated_again


@register("rms_norm", "torch")
def rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """PyTorch's fused kernel where there is one; on a CPU it is not fused, and one node of our own is faster."""
    if x.device.type != "cpu":
        return F.rms_norm(x, weight.shape, weight, eps)
    normed: Tensor = _RMSNorm.apply(x, weight, eps)
    return normed


@register("add_rms_norm", "torch")
def add_rms_norm_torch(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum, which the caller wants as well, then the norm."""
    total = x + residual
    return rms_norm_torch(total, weight, eps), total


@register("scaled_masked_softmax", "torch")
def scaled_masked_softmax_torch(x: Tensor, blocked_mask: Tensor, scale: float) -> Tensor:
    """Keeps only the probabilities for the backward pass, in the type of `x`."""
    probabilities: Tensor = _MaskedSoftmax.apply(x, blocked_mask, scale)
    return probabilities


@register("rotary", "torch")
def rotary_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Three passes over the heads and one autograd node."""
    rotated: Tensor = _Rotary.apply(x, cos, sin, interleaved)
    return rotated


@register("rotary_qkv", "torch")
def rotary_qkv_torch(qkv: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms | None = None) -> Heads:
    """Views of the projection where possible, then norm and rotation."""
    return one_after_the_other(rms_norm_torch, rotary_torch, qkv, cos, sin, norms)


@register("swiglu", "torch")
def swiglu_torch(x: Tensor) -> Tensor:
    """silu and product; keeps only `x` for the backward pass."""
    activated: Tensor = _SwiGLU.apply(x)
    return activated


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        dtype = compute_dtype(x)
        wide = x.to(dtype)
        scale = wide.square().mean(dim=-1, keepdim=True).add_(eps).rsqrt_()  # [..., 1]
        ctx.save_for_backward(x, weight, scale)
        ctx.eps = eps
        return (wide * scale).mul_(weight.to(dtype)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        if is_differentiated_again():  # scale is a constant to autograd
            return gradients_of_reference(rms_norm_reference, (x, weight, ctx.eps), grad)
        wide_weight, wide_grad = weight.to(scale.dtype), grad.to(scale.dtype)
        normed = x.to(scale.dtype) * scale
        product = wide_grad * normed
        grad_weight = product.reshape(-1, weight.shape[0]).sum(dim=0)
        # The part that only changes the length.
        along = (product @ wide_weight).unsqueeze(-1).mul_(-1 / weight.shape[0])
        grad_x = (wide_grad * wide_weight).addcmul_(normed, along).mul_(scale)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _turn(x, cos, sin, interleaved, backward=False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, sin, ctx.interleaved, backward=True), None, None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, *, backward: bool) -> Tensor:
    """x * cos + rotate(x) * sin, or its transpose: the sine of the other member of the pair, with its sign turned."""
    dtype = compute_dtype(x)
    wide = x.to(dtype)
    cos, sin = cos.to(dtype)[:, None, :], sin.to(dtype)[:, None, :]
    first, second = _pair(sin, interleaved)
    x_first, x_second = _pair(wide, interleaved)
    result = wide * cos
    y_first, y_second = _pair(result, interleaved)
    if backward:
        y_first.addcmul_(x_second, second)
        y_second.addcmul_(x_first, first, value=-1)
    else:
        y_first.addcmul_(x_second, first, value=-1)
        y_second.addcmul_(x_first, second)
    return result.to(x.dtype)


def _pair(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.to(compute_dtype(x)).chunk(2, dim=-1)
        return F.silu(gate).mul_(up).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor | None:
        (x,) = ctx.saved_tensors
        if is_differentiated_again():  # autograd does not follow the writes into one result below
            return gradients_of_reference(swiglu_reference, (x,), grad)[0]
        dtype = compute_dtype(x)
        gate, up = x.to(dtype).chunk(2, dim=-1)
        grad = grad.to(dtype)
        result = torch.empty(x.shape, dtype=dtype, device=x.device)
        grad_gate, grad_up = result.chunk(2, dim=-1)
        torch.mul(grad, F.silu(gate), out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return result.to(x.dtype)


class _MaskedSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, blocked_mask: Tensor, scale: float) -> Tensor:
        logits = x.to(compute_dtype(x)).mul(scale).masked_fill_(blocked_mask, BLOCKED_LOGIT)
        probabilities = logits.softmax(dim=-1).to(x.dtype)
        ctx.save_for_backward(probabilities, blocked_mask)
        ctx.scale = scale
        return probabilities

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        probabilities, blocked_mask = ctx.saved_tensors
        dtype = compute_dtype(grad)
        grad_logits = torch._softmax_backward_data(grad.to(dtype), probabilities.to(dtype), -1, dtype)
        return grad_logits.mul_(ctx.scale).masked_fill_(blocked_mask, 0.0).to(grad.dtype), None, None
