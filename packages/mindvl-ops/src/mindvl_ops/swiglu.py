# SPDX-License-Identifier: Apache-2.0
"""SwiGLU activation: contract and reference. Source: Shazeer, "GLU Variants Improve Transformer", 2020."""

import torch
from torch import Tensor

from .backend import chosen
from .cases import Case, Inputs, case_of
from .errors import OpsError
from .precision import compute_dtype
from .registry import register


def swiglu(x: Tensor) -> Tensor:
    """`silu(gate) * up` for `x = [gate | up]`.

    Args:
        x: `[..., 2F]`, first half gate, second half up (not interleaved).

    Returns:
        `[..., F]`, computed in float32 and rounded once.
    """
    if not x.dim() or x.shape[-1] % 2:
        raise OpsError(f"swiglu: the last axis of {list(x.shape)} is not even. Give [gate | up] of equal halves.")
    result: Tensor = chosen("swiglu")(x)
    return result


@register("swiglu", "reference")
def swiglu_reference(x: Tensor) -> Tensor:
    """The formula as written."""
    gate, up = x.to(compute_dtype(x)).chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(x.dtype)


@case_of("swiglu")
def _case(inputs: Inputs) -> Case:
    return Case(swiglu, (inputs.normal(inputs.tokens, 8 * inputs.tokens),))
