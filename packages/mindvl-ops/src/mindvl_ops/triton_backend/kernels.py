# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""The Triton kernels. The only module that imports triton; imported at the first launch.

Every kernel computes in float32 and rounds each result once; `total` and the normalized heads are rounded before they are used
further, as their contracts say. No kernel uses atomic operations, so results are reproducible bitwise.
"""

import triton
import triton.language as tl

__all__ = [
    "norm_backward",
    "norm_forward",
    "qkv_backward",
    "qkv_forward",
    "rotary",
    "swiglu_backward",
    "swiglu_forward",
]


@triton.jit
def norm_forward(
    x,
    residual,
    weight,
    normed,
    total,
    x_stride,
    residual_stride,
    width,
    eps,
    has_residual: tl.constexpr,
    block: tl.constexpr,
):
    """One row in one program: RMSNorm of x, or of total = x + residual."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < width
    wide = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if has_residual:
        wide += tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
        rounded = wide.to(total.dtype.element_ty)
        tl.store(total + row * width + column, rounded, mask=inside)
        wide = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    result = wide * scale * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + row * width + column, result.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def norm_backward(
    grad,
    grad_total,
    x,
    weight,
    grad_x,
    grad_weight,
    grad_stride,
    grad_total_stride,
    x_stride,
    rows,
    width,
    eps,
    has_grad_total: tl.constexpr,
    block: tl.constexpr,
):
    """Rows p, p + P, ... in program p of P: gradient of x (the sum, with a residual), and its part of the weight's."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, block)
    inside = column < width
    wide_weight = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    sum_of_weight = tl.zeros((block,), dtype=tl.float32)
    for number in range(program, rows, programs):
        row = tl.cast(number, tl.int64)
        wide = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        wide_grad = tl.load(grad + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
        product = wide_grad * wide * scale
        sum_of_weight += product
        along = tl.sum(product * wide_weight, axis=0) / width  # the part that only changes the length
        result = (wide_grad * wide_weight - wide * scale * along) * scale
        if has_grad_total:
            result += tl.load(grad_total + row * grad_total_stride + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_x + row * width + column, result.to(grad_x.dtype.element_ty), mask=inside)
    tl.store(grad_weight + program * width + column, sum_of_weight, mask=inside)


@triton.jit
def swiglu_forward(x, y, x_stride, width, block: tl.constexpr):
    """silu(gate) * up for a part of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    gate = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + width + column, mask=inside, other=0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    tl.store(y + row * width + column, result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward(grad, x, grad_x, grad_stride, x_stride, width, block: tl.constexpr):
    """Gradients of gate and up for a part of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    wide_grad = tl.load(grad + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + width + column, mask=inside, other=0.0).to(tl.float32)
    gated = tl.sigmoid(gate)
    grad_gate = wide_grad * up * gated * (1.0 + gate * (1.0 - gated))
    grad_up = wide_grad * gate * gated
    out = grad_x + row * 2 * width + column
    tl.store(out, grad_gate.to(grad_x.dtype.element_ty), mask=inside)
    tl.store(out + width, grad_up.to(grad_x.dtype.element_ty), mask=inside)


@triton.jit
def rotary(
    x,
    cos,
    sin,
    y,
    token_stride,
    head_stride,
    tokens,
    heads,
    half,
    interleaved: tl.constexpr,
    transposed: tl.constexpr,
    token_block: tl.constexpr,
    half_block: tl.constexpr,
):
    """All heads of a block of tokens, so that cosine and sine are read once; `transposed` is the backward pass."""
    token = tl.program_id(0).to(tl.int64) * token_block + tl.arange(0, token_block)[:, None]
    pair = tl.arange(0, half_block)[None, :]
    inside = (token < tokens) & (pair < half)
    first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half)
    cos_first, cos_second = _pair(cos + token * 2 * half, first, second, inside)
    sin_first, sin_second = _pair(sin + token * 2 * half, first, second, inside)
    for head in range(heads):
        x_first, x_second = _pair(x + token * token_stride + head * head_stride, first, second, inside)
        y_first, y_second = _turned(x_first, x_second, cos_first, cos_second, sin_first, sin_second, transposed)
        _store_pair(y + (token * heads + head) * 2 * half, first, second, y_first, y_second, inside)


@triton.jit
def qkv_forward(
    qkv,
    cos,
    sin,
    query_weight,
    key_weight,
    query,
    key,
    value,
    token_stride,
    tokens,
    groups,
    heads,
    half,
    eps,
    has_norms: tl.constexpr,
    token_block: tl.constexpr,
    half_block: tl.constexpr,
):
    """All heads of a block of tokens; `heads` is the number of query heads in each of the `groups`."""
    token = tl.program_id(0).to(tl.int64) * token_block + tl.arange(0, token_block)[:, None]
    first = tl.arange(0, half_block)[None, :]
    second = first + half
    inside = (token < tokens) & (first < half)
    width = 2 * half
    cos_first, cos_second = _pair(cos + token * width, first, second, inside)
    sin_first, sin_second = _pair(sin + token * width, first, second, inside)
    for group in range(groups):
        source = qkv + token * token_stride + group * (heads + 2) * width
        for head in range(heads + 1):  # the query heads of the group, then its key
            x_first, x_second = _pair(source + head * width, first, second, inside)
            if has_norms:
                weight = query_weight if head < heads else key_weight
                scale = _scale(x_first, x_second, width, eps)
                w_first, w_second = _pair(weight, first, second, first < half)
                x_first = (x_first * scale * w_first).to(query.dtype.element_ty).to(tl.float32)
                x_second = (x_second * scale * w_second).to(query.dtype.element_ty).to(tl.float32)
            y_first, y_second = _turned(x_first, x_second, cos_first, cos_second, sin_first, sin_second, False)
            if head < heads:
                out = query + ((token * groups + group) * heads + head) * width
            else:
                out = key + (token * groups + group) * width
            _store_pair(out, first, second, y_first, y_second, inside)
        x_first, x_second = _pair(source + (heads + 1) * width, first, second, inside)
        _store_pair(value + (token * groups + group) * width, first, second, x_first, x_second, inside)


@triton.jit
def qkv_backward(
    grad_query,
    grad_key,
    grad_value,
    qkv,
    cos,
    sin,
    query_weight,
    key_weight,
    grad_qkv,
    grad_weights,
    token_stride,
    tokens,
    groups,
    heads,
    half,
    eps,
    has_norms: tl.constexpr,
    token_block: tl.constexpr,
    half_block: tl.constexpr,
):
    """Blocks p, p + P, ... of tokens in program p of P: gradient of the projection, and its part of the weights'."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    first = tl.arange(0, half_block)[None, :]
    second = first + half
    width = 2 * half
    query_first = tl.zeros((token_block, half_block), dtype=tl.float32)  # gradients of the weights, summed at the end
    query_second = tl.zeros((token_block, half_block), dtype=tl.float32)
    key_first = tl.zeros((token_block, half_block), dtype=tl.float32)
    key_second = tl.zeros((token_block, half_block), dtype=tl.float32)
    for number in range(program, tl.cdiv(tokens, token_block), programs):
        token = tl.cast(number, tl.int64) * token_block + tl.arange(0, token_block)[:, None]
        inside = (token < tokens) & (first < half)
        cos_first, cos_second = _pair(cos + token * width, first, second, inside)
        sin_first, sin_second = _pair(sin + token * width, first, second, inside)
        for group in range(groups):
            at = group * (heads + 2) * width
            out = grad_qkv + token * groups * (heads + 2) * width + at
            for head in range(heads + 1):  # the query heads of the group, then its key
                if head < heads:
                    grad = grad_query + ((token * groups + group) * heads + head) * width
                else:
                    grad = grad_key + (token * groups + group) * width
                g_first, g_second = _pair(grad, first, second, inside)
                g_first, g_second = _turned(g_first, g_second, cos_first, cos_second, sin_first, sin_second, True)
                if has_norms:
                    weight = query_weight if head < heads else key_weight
                    x_first, x_second = _pair(qkv + token * token_stride + at + head * width, first, second, inside)
                    scale = _scale(x_first, x_second, width, eps)
                    x_first, x_second = x_first * scale, x_second * scale
                    if head < heads:
                        query_first += g_first * x_first
                        query_second += g_second * x_second
                    else:
                        key_first += g_first * x_first
                        key_second += g_second * x_second
                    w_first, w_second = _pair(weight, first, second, first < half)
                    g_first, g_second = g_first * w_first, g_second * w_second
                    along = tl.sum(g_first * x_first + g_second * x_second, axis=1)[:, None] / width
                    g_first, g_second = (g_first - x_first * along) * scale, (g_second - x_second * along) * scale
                _store_pair(out + head * width, first, second, g_first, g_second, inside)
            g_first, g_second = _pair(grad_value + (token * groups + group) * width, first, second, inside)
            _store_pair(out + (heads + 1) * width, first, second, g_first, g_second, inside)
    if has_norms:
        columns = tl.arange(0, half_block)
        sums = grad_weights + program * 2 * width + columns
        tl.store(sums, tl.sum(query_first, axis=0), mask=columns < half)
        tl.store(sums + half, tl.sum(query_second, axis=0), mask=columns < half)
        tl.store(sums + width, tl.sum(key_first, axis=0), mask=columns < half)
        tl.store(sums + width + half, tl.sum(key_second, axis=0), mask=columns < half)


@triton.jit
def _pair(source, first, second, inside):
    """The two members of every pair in float32."""
    return (
        tl.load(source + first, mask=inside, other=0.0).to(tl.float32),
        tl.load(source + second, mask=inside, other=0.0).to(tl.float32),
    )


@triton.jit
def _store_pair(out, first, second, y_first, y_second, inside):
    tl.store(out + first, y_first.to(out.dtype.element_ty), mask=inside)
    tl.store(out + second, y_second.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _turned(
    x_first,
    x_second,
    cos_first,
    cos_second,
    sin_first,
    sin_second,
    transposed: tl.constexpr,
):
    """x * cos + rotate(x) * sin, or its transpose."""
    if transposed:
        return x_first * cos_first + x_second * sin_second, x_second * cos_second - x_first * sin_first
    return x_first * cos_first - x_second * sin_first, x_second * cos_second + x_first * sin_second


@triton.jit
def _scale(x_first, x_second, width, eps):
    """Reciprocal root mean square of every row `[tokens, 1]`."""
    return tl.rsqrt(tl.sum(x_first * x_first + x_second * x_second, axis=1)[:, None] / width + eps)
