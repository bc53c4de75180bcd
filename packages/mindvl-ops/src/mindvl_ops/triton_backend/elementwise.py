# SPDX-License-Identifier: Apache-2.0
"""RMSNorm, rotary and SwiGLU on the Triton kernels: one pass over memory in each direction and one autograd node each.

Comes after the contracts, before `library.py`. Second derivatives (`create_graph=True`) are those of the reference.
"""

from typing import Any

import torch
from torch import Tensor

from ..errors import OpsError
from ..norm import rms_norm_reference
from ..registry import register
from ..rope import rotary_reference
from ..rotary_qkv import HeadNorms, Heads, rotary_qkv_reference
from ..swiglu import swiglu_reference
from ..torch_backend.derivatives import gradients_of_reference, is_differentiated_again
from .installed import check_device
from .library import MAX_NORM_WIDTH

_TYPES = (torch.float32, torch.bfloat16, torch.float16)


@register("rms_norm", "triton")
def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """One kernel forward, one backward; the scale is computed again in the backward pass."""
    _check_norm("rms_norm", x)
    normed: Tensor = _RMSNorm.apply(x, weight, eps)
    return normed


@register("add_rms_norm", "triton")
def add_rms_norm_triton(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """One kernel forward, and one backward that also adds the gradient of the total."""
    _check_norm("add_rms_norm", x)
    normed, total = _AddRMSNorm.apply(x, residual, weight, eps)
    return normed, total


@register("swiglu", "triton")
def swiglu_triton(x: Tensor) -> Tensor:
    """One kernel forward, one backward."""
    _check("swiglu", x)
    activated: Tensor = _SwiGLU.apply(x)
    return activated


@register("rotary", "triton")
def rotary_triton(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """One kernel for all heads of a token; reads slices of wider tensors without a copy."""
    _check("rotary", x)
    rotated: Tensor = _Rotary.apply(x, *_tables(cos, sin), interleaved)
    return rotated


@register("rotary_qkv", "triton")
def rotary_qkv_triton(qkv: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms | None = None) -> Heads:
    """One kernel forward, one backward: each value of the projection and of its gradient is read and written once."""
    _check("rotary_qkv", qkv)
    query_weight, key_weight, eps = norms or (None, None, 0.0)
    query, key, value = _RotaryQKV.apply(qkv, *_tables(cos, sin), query_weight, key_weight, eps)
    return query, key, value


def _check(operator: str, x: Tensor) -> None:
    check_device(operator, x)
    if x.dtype not in _TYPES:
        raise OpsError(
            f"triton {operator}: x is {x.dtype}: the kernel takes float32, bfloat16 and float16. Choose backend torch "
            "for this operator."
        )


def _check_norm(operator: str, x: Tensor) -> None:
    _check(operator, x)
    if x.shape[-1] > MAX_NORM_WIDTH:
        raise OpsError(
            f"triton {operator}: rows of {x.shape[-1]} values: the kernel takes at most {MAX_NORM_WIDTH}. Choose backend "
            "torch for this operator."
        )


def _tables(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return cos.detach().float().contiguous(), sin.detach().float().contiguous()


def _rows(x: Tensor) -> Tensor:
    """`[..., H]` as rows `[M, H]` with a contiguous last axis; a copy only where the strides demand it."""
    if not x.numel():
        return x.reshape(-1, x.shape[-1]) if x.shape[-1] else x.new_empty(0, 0)
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        normed: Tensor = torch.ops.mindvl.rms_norm(_rows(x), weight.contiguous(), eps)
        return normed.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if is_differentiated_again():
            return gradients_of_reference(rms_norm_reference, (x, weight, ctx.eps), grad)
        grad_x, grad_weight = _norm_gradients(grad, None, x, weight, ctx.eps)
        return grad_x, grad_weight, None


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        normed, total = torch.ops.mindvl.add_rms_norm(_rows(x), _rows(residual), weight.contiguous(), eps)
        normed, total = normed.view(x.shape), total.view(x.shape)
        ctx.save_for_backward(total, weight)
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        return normed, total

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_total: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight = ctx.saved_tensors
        if grad is None:
            return grad_total, grad_total, None, None
        if is_differentiated_again():
            grad_x, grad_weight, _ = gradients_of_reference(rms_norm_reference, (total, weight, ctx.eps), grad)
            if grad_total is not None:
                grad_x = grad_total if grad_x is None else grad_x + grad_total
        else:
            grad_x, grad_weight = _norm_gradients(grad, grad_total, total, weight, ctx.eps)
        return grad_x, grad_x, grad_weight, None


def _norm_gradients(
    grad: Tensor, grad_total: Tensor | None, x: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    others = None if grad_total is None else _rows(grad_total)
    grad_x, partial = torch.ops.mindvl.rms_norm_backward(_rows(grad), others, _rows(x), weight.contiguous(), eps)
    return grad_x.view(x.shape), partial.sum(dim=0).to(weight.dtype)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        activated: Tensor = torch.ops.mindvl.swiglu(_rows(x))
        return activated.view(*x.shape[:-1], x.shape[-1] // 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor | None:
        (x,) = ctx.saved_tensors
        if is_differentiated_again():
            return gradients_of_reference(swiglu_reference, (x,), grad)[0]
        grad_x: Tensor = torch.ops.mindvl.swiglu_backward(_rows(grad), _rows(x))
        return grad_x.view(x.shape)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotated(x, cos, sin, interleaved, transposed=False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        if is_differentiated_again():  # linear in x: the gradient does not depend on it
            x = torch.zeros_like(grad).requires_grad_()
            return gradients_of_reference(rotary_reference, (x, cos, sin, ctx.interleaved), grad)
        return _rotated(grad, cos, sin, ctx.interleaved, transposed=True), None, None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, *, transposed: bool) -> Tensor:
    x = x if x.stride(2) == 1 else x.contiguous()
    rotated: Tensor = torch.ops.mindvl.rotary(x, cos, sin, interleaved, transposed)
    return rotated


class _RotaryQKV(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, query_weight: Tensor | None, key_weight: Tensor | None,
        eps: float,
    ) -> Heads:  # fmt: skip
        qkv = qkv if qkv.stride(2) == 1 and qkv.stride(1) == qkv.shape[2] else qkv.contiguous()
        # Without norms the gradient does not depend on the projection.
        ctx.save_for_backward(None if query_weight is None else qkv, cos, sin, query_weight, key_weight)
        ctx.eps = eps
        heads: Heads = torch.ops.mindvl.rotary_qkv(qkv, cos, sin, query_weight, key_weight, eps)
        return heads

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv, cos, sin, query_weight, key_weight = ctx.saved_tensors
        if is_differentiated_again():
            return *_reference_gradients(ctx, grads), None
        grad_qkv, partial = torch.ops.mindvl.rotary_qkv_backward(
            *(grad.contiguous() for grad in grads), qkv, cos, sin, query_weight, key_weight, ctx.eps
        )
        if query_weight is None:
            return grad_qkv, None, None, None, None, None
        query_sum, key_sum = partial.sum(dim=0)
        return grad_qkv, None, None, query_sum.to(query_weight.dtype), key_sum.to(key_weight.dtype), None


def _reference_gradients(ctx: Any, grads: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """Gradients that can be differentiated again, of the projection, the tables (none) and the weights."""
    qkv, cos, sin, query_weight, key_weight = ctx.saved_tensors
    if qkv is None:
        groups, width = grads[1].shape[1], grads[1].shape[2]
        qkv = (
            grads[0].new_zeros(len(grads[0]), groups, grads[0].shape[1] // groups * width + 2 * width).requires_grad_()
        )

    def flat(qkv: Tensor, cos: Tensor, sin: Tensor, query_weight: Tensor | None, key_weight: Tensor | None) -> Tensor:
        norms = None if query_weight is None or key_weight is None else HeadNorms(query_weight, key_weight, ctx.eps)
        return torch.cat([x.flatten() for x in rotary_qkv_reference(qkv, cos, sin, norms)])

    grad = torch.cat([grad.flatten() for grad in grads])
    return gradients_of_reference(flat, (qkv, cos, sin, query_weight, key_weight), grad)
