# SPDX-License-Identifier: Apache-2.0
"""The kernels as operators of PyTorch (`torch.ops.mindvl`), with the rule for fake tensors.

Comes between the autograd nodes in `elementwise.py` and `kernels.py`. Tensors arrive as rows whose last axis is contiguous;
every result is a new contiguous tensor. A profiler, fake tensors and a count of bytes see each of them as one call.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Programs of a backward pass that sums over rows: each keeps one partial sum of the gradient of the weight. A constant, so that
# the order of the sum, and with it the last bit, does not depend on the device. Not yet tuned on a device.
PROGRAMS = 512
# Elements of one program of `swiglu`, and tokens of one program of the rotations. Not yet tuned on a device.
_SWIGLU_BLOCK = 1024
_TOKEN_BLOCK = 4
MAX_NORM_WIDTH = 65536  # one program holds a whole row

Heads = tuple[Tensor, Tensor, Tensor]


def partial_sums(rows: int) -> int:
    """Number of partial sums of the gradient of a weight over `rows` rows."""
    return min(rows, PROGRAMS)


def _operator(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator that defines an operator and registers its launch and its rule for fake tensors."""

    def enter(launch: Callable[..., Any]) -> Callable[..., Any]:
        name = f"mindvl::{schema.partition('(')[0]}"
        torch.library.define(name, schema.removeprefix(name.removeprefix("mindvl::")))
        torch.library.impl(name, ("cuda", "cpu"), launch)  # cpu: Triton's interpreter
        torch.library.register_fake(name, fake)
        return launch

    return enter


def _kernels() -> Any:
    from . import kernels  # imports triton

    return kernels


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _norm_warps(width: int) -> int:
    return min(max(_power_of_two(width) // 512, 1), 16)


def _fake_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


@_operator("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", _fake_norm)
def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    normed = x.new_empty(x.shape)
    _launch_norm(x, None, weight, normed, x, eps)
    return normed


def _fake_add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


@_operator(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor normed, Tensor total)", _fake_add_norm
)
def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    normed, total = x.new_empty(x.shape), x.new_empty(x.shape)
    _launch_norm(x, residual, weight, normed, total, eps)
    return normed, total


def _launch_norm(x: Tensor, residual: Tensor | None, weight: Tensor, normed: Tensor, total: Tensor, eps: float) -> None:
    if not x.numel():
        return
    rows, width = x.shape
    other = x if residual is None else residual
    with torch.cuda.device_of(x):
        _kernels().norm_forward[(rows,)](
            x, other, weight, normed, total, x.stride(0), other.stride(0), width, eps,
            has_residual=residual is not None, block=_power_of_two(width), num_warps=_norm_warps(width),
        )  # fmt: skip


def _fake_norm_backward(
    grad: Tensor, grad_total: Tensor | None, x: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    partial = x.new_empty(partial_sums(x.shape[0]), x.shape[1], dtype=torch.float32)
    return x.new_empty(x.shape), partial


@_operator(
    "rms_norm_backward(Tensor grad, Tensor? grad_total, Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
    _fake_norm_backward,
)
def _rms_norm_backward(
    grad: Tensor, grad_total: Tensor | None, x: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    grad_x, partial = _fake_norm_backward(grad, grad_total, x, weight, eps)
    if not x.numel():
        return grad_x, partial
    rows, width = x.shape
    other = grad if grad_total is None else grad_total
    with torch.cuda.device_of(x):
        _kernels().norm_backward[(len(partial),)](
            grad, other, x, weight, grad_x, partial, grad.stride(0), other.stride(0), x.stride(0), rows, width, eps,
            has_grad_total=grad_total is not None, block=_power_of_two(width), num_warps=_norm_warps(width),
        )  # fmt: skip
    return grad_x, partial


def _fake_swiglu(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // 2)


@_operator("swiglu(Tensor x) -> Tensor", _fake_swiglu)
def _swiglu(x: Tensor) -> Tensor:
    y = _fake_swiglu(x)
    rows, width = y.shape
    if y.numel():
        block = min(_SWIGLU_BLOCK, _power_of_two(width))
        with torch.cuda.device_of(x):
            _kernels().swiglu_forward[(rows, -(-width // block))](x, y, x.stride(0), width, block=block)
    return y


def _fake_swiglu_backward(grad: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@_operator("swiglu_backward(Tensor grad, Tensor x) -> Tensor", _fake_swiglu_backward)
def _swiglu_backward(grad: Tensor, x: Tensor) -> Tensor:
    grad_x = x.new_empty(x.shape)
    rows, width = grad.shape
    if grad.numel():
        block = min(_SWIGLU_BLOCK, _power_of_two(width))
        with torch.cuda.device_of(x):
            _kernels().swiglu_backward[(rows, -(-width // block))](
                grad, x, grad_x, grad.stride(0), x.stride(0), width, block=block
            )
    return grad_x


def _fake_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, transposed: bool) -> Tensor:
    return x.new_empty(x.shape)


@_operator("rotary(Tensor x, Tensor cos, Tensor sin, bool interleaved, bool transposed) -> Tensor", _fake_rotary)
def _rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, transposed: bool) -> Tensor:
    y = x.new_empty(x.shape)
    tokens, heads, width = x.shape
    if y.numel():
        with torch.cuda.device_of(x):
            _kernels().rotary[(-(-tokens // _TOKEN_BLOCK),)](
                x, cos, sin, y, x.stride(0), x.stride(1), tokens, heads, width // 2, interleaved=interleaved,
                transposed=transposed, token_block=_TOKEN_BLOCK, half_block=_power_of_two(width // 2), num_warps=2,
            )  # fmt: skip
    return y


def _fake_qkv(
    qkv: Tensor, cos: Tensor, sin: Tensor, query_weight: Tensor | None, key_weight: Tensor | None, eps: float
) -> Heads:
    tokens, groups, width = *qkv.shape[:2], cos.shape[1]
    query = qkv.new_empty(tokens, groups * (qkv.shape[2] // width - 2), width)
    return query, qkv.new_empty(tokens, groups, width), qkv.new_empty(tokens, groups, width)


@_operator(
    "rotary_qkv(Tensor qkv, Tensor cos, Tensor sin, Tensor? query_weight, Tensor? key_weight, float eps)"
    " -> (Tensor query, Tensor key, Tensor value)",
    _fake_qkv,
)
def _rotary_qkv(
    qkv: Tensor, cos: Tensor, sin: Tensor, query_weight: Tensor | None, key_weight: Tensor | None, eps: float
) -> Heads:
    query, key, value = _fake_qkv(qkv, cos, sin, query_weight, key_weight, eps)
    tokens, groups, width = key.shape
    if qkv.numel():
        with torch.cuda.device_of(qkv):
            _kernels().qkv_forward[(-(-tokens // _TOKEN_BLOCK),)](
                qkv, cos, sin, qkv if query_weight is None else query_weight, qkv if key_weight is None else key_weight,
                query, key, value, qkv.stride(0), tokens, groups, query.shape[1] // groups, width // 2, eps,
                has_norms=query_weight is not None, token_block=_TOKEN_BLOCK, half_block=_power_of_two(width // 2),
                num_warps=2,
            )  # fmt: skip
    return query, key, value


def _fake_qkv_backward(
    grad_query: Tensor, grad_key: Tensor, grad_value: Tensor, qkv: Tensor | None, cos: Tensor, sin: Tensor,
    query_weight: Tensor | None, key_weight: Tensor | None, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    tokens, groups, width = grad_key.shape
    sums = partial_sums(-(-tokens // _TOKEN_BLOCK)) if query_weight is not None else 0
    partial = grad_key.new_empty(sums, 2, width, dtype=torch.float32)
    return grad_key.new_empty(tokens, groups, (grad_query.shape[1] // groups + 2) * width), partial


@_operator(
    "rotary_qkv_backward(Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor? qkv, Tensor cos, Tensor sin,"
    " Tensor? query_weight, Tensor? key_weight, float eps) -> (Tensor grad_qkv, Tensor grad_weights)",
    _fake_qkv_backward,
)
def _rotary_qkv_backward(
    grad_query: Tensor, grad_key: Tensor, grad_value: Tensor, qkv: Tensor | None, cos: Tensor, sin: Tensor,
    query_weight: Tensor | None, key_weight: Tensor | None, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    given = (grad_query, grad_key, grad_value, qkv, cos, sin, query_weight, key_weight)
    grad_qkv, partial = _fake_qkv_backward(*given, eps)
    tokens, groups, width = grad_key.shape
    if not grad_qkv.numel():
        return grad_qkv, partial
    unused = grad_key  # stands for tensors that a layer without norms does not have
    has_norms = qkv is not None
    with torch.cuda.device_of(grad_key):
        _kernels().qkv_backward[(partial_sums(-(-tokens // _TOKEN_BLOCK)),)](
            grad_query, grad_key, grad_value, unused if qkv is None else qkv, cos, sin,
            unused if query_weight is None else query_weight, unused if key_weight is None else key_weight,
            grad_qkv, partial, 0 if qkv is None else qkv.stride(0), tokens, groups, grad_query.shape[1] // groups,
            width // 2, eps, has_norms=has_norms, token_block=_TOKEN_BLOCK, half_block=_power_of_two(width // 2),
            num_warps=2,
        )  # fmt: skip
    return grad_qkv, partial
