# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding, applied: contract and reference.

The caller provides the angles (1-D, M-RoPE, 2-D of the vision encoder); this operator rotates the heads. Source: Su et al.,
"RoFormer", 2021; half style as in GPT-NeoX, interleaved style as in the paper.
"""

import torch
from torch import Tensor

from .angles import rotary_tables
from .backend import chosen
from .cases import Case, Inputs, case_of
from .precision import compute_dtype
from .registry import register


def rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """`x * cos + rotate(x) * sin` for every head.

    Args:
        x: `[T, N, D]`, D even.
        cos, sin: `[T, D]` float32, constants (no gradient flows into them). Half style: the second half repeats the
            first. Interleaved: neighbours repeat each other.
        interleaved: Pairs are (0, 1), (2, 3), ... instead of (0, D/2), (1, D/2 + 1), ...

    Returns:
        `[T, N, D]` in the type of `x`; computed in float32.
    """
    result: Tensor = chosen("rotary")(x, cos, sin, interleaved)
    return result


@register("rotary", "reference")
def rotary_reference(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """The formula as written."""
    wide = x.to(compute_dtype(x))
    cos, sin = cos.to(wide.dtype)[:, None, :], sin.to(wide.dtype)[:, None, :]  # [T, 1, D]
    return (wide * cos + rotate(wide, interleaved) * sin).to(x.dtype)


def rotate(x: Tensor, interleaved: bool) -> Tensor:
    """A quarter turn of every pair: (a, b) -> (-b, a)."""
    if interleaved:
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack((-odd, even), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


@case_of("rotary")
def _case(inputs: Inputs) -> Case:
    def turned(x: Tensor) -> Tensor:
        cos, sin = rotary_tables(torch.arange(len(x), device=x.device), x.shape[-1], 10000.0)
        return rotary(x, cos, sin)

    return Case(turned, (inputs.normal(inputs.tokens, 4, 32),))
