# SPDX-License-Identifier: Apache-2.0
"""RMSNorm, rotary, SwiGLU and masked softmax on torch_npu's fused operators; their gradients are torch_npu's own, but for rotary.

Contract: NPU_CONTRACTS, sections 3 to 6. Rules that the device would notice late, or not at all, are checked here.
"""

from typing import Any

import torch
from torch import Tensor

from ..errors import OpsError
from ..registry import register
from ..rotary_qkv import HeadNorms, Heads, one_after_the_other
from ..torch_backend.derivatives import without_second_derivative
from .extension import torch_npu

MAX_ROTARY_WIDTH = 896
MAX_ROTARY_HEADS = 1000
SOFTMAX_SIDES = range(32, 4096 + 1, 32)
NORM_TYPES = {
    (torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32),
}  # fmt: skip


@register("rms_norm", "npu")
def rms_norm_npu(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """One kernel, float32 inside and one rounding."""
    if (x.dtype, weight.dtype) not in NORM_TYPES:
        raise OpsError(
            f"npu rms_norm: x {x.dtype} with weight {weight.dtype}: the kernel does not take it. Give one type, or 16 "
            "bit with a float32 weight."
        )
    if not x.numel():  # no empty tensor is documented
        return x * weight.to(x.dtype)
    rows = x if 2 <= x.dim() <= 8 else x.reshape(-1, x.shape[-1])
    normed: Tensor = torch_npu().npu_rms_norm(rows, weight, epsilon=eps)[0]
    return without_second_derivative(normed.view(x.shape), "npu rms_norm")


@register("add_rms_norm", "npu")
def add_rms_norm_npu(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Sum, then norm: npu_add_rms_norm has no backward and rounds the product with the weight twice."""
    total = x + residual
    return rms_norm_npu(total, weight, eps), total


@register("rotary", "npu")
def rotary_npu(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """In float32: the kernel would first round cosine and sine to the type of `x`."""
    tokens, heads, width = x.shape
    if width % 2 or width >= MAX_ROTARY_WIDTH or heads >= MAX_ROTARY_HEADS:
        raise OpsError(
            f"npu rotary: {heads} heads of {width}: the kernel takes fewer than {MAX_ROTARY_HEADS}, of an even width "
            f"below {MAX_ROTARY_WIDTH}. Choose backend torch for rotary."
        )
    if not tokens:
        return x.clone()
    turned: Tensor = _Rotary.apply(x, cos.detach().float(), sin.detach().float(), interleaved)
    return turned


@register("rotary_qkv", "npu")
def rotary_qkv_npu(qkv: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms | None = None) -> Heads:
    """Norm and rotation of queries and of keys: the wheel has no kernel for the three steps with gradients."""
    return one_after_the_other(rms_norm_npu, rotary_npu, qkv, cos, sin, norms)


@register("swiglu", "npu")
def swiglu_npu(x: Tensor) -> Tensor:
    """One kernel, float32 inside and one rounding; it wants contiguous input, not empty."""
    if not x.numel():
        return x[..., : x.shape[-1] // 2].clone()
    activated: Tensor = torch_npu().npu_swiglu(x.contiguous(), dim=-1)
    return without_second_derivative(activated, "npu swiglu")


class _Rotary(torch.autograd.Function):
    """The kernel, of which backward keeps the tables alone; its derivative in torch_npu keeps `x` in float32.

    The transpose of a rotation is the rotation by the negative angle: the sines of a pair are equal.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        turned: Tensor = torch_npu().npu_rotary_mul(
            x.float().contiguous(),
            cos[:, None, :],  # [T, 1, D]
            sin[:, None, :],
            rotary_mode="interleave" if interleaved else "half",
        )
        return turned.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _Rotary.apply(grad, cos, -sin, ctx.interleaved), None, None, None  # linear: derivable to any order


@register("scaled_masked_softmax", "npu")
def scaled_masked_softmax_npu(x: Tensor, blocked_mask: Tensor, scale: float) -> Tensor:
    """One kernel; both sides must be multiples of 32 up to 4096."""
    if x.shape[2] not in SOFTMAX_SIDES or x.shape[3] not in SOFTMAX_SIDES:
        raise OpsError(
            f"npu scaled_masked_softmax: {x.shape[2]} x {x.shape[3]}: the kernel takes multiples of 32 up to 4096. "
            "Pad both sides, or choose backend torch for it."
        )
    probabilities: Tensor = torch_npu().npu_scaled_masked_softmax(x, blocked_mask, scale, False)
    return without_second_derivative(probabilities, "npu scaled_masked_softmax")
