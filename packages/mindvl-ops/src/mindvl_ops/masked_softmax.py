# SPDX-License-Identifier: Apache-2.0
"""Scaled masked softmax: contract and reference. For attention that needs its probabilities written out."""

import torch
from torch import Tensor

from .backend import chosen
from .cases import Case, Inputs, case_of
from .errors import OpsError
from .precision import compute_dtype
from .registry import register

BLOCKED_LOGIT = -10000.0  # what the NPU kernel and Megatron's put at masked places


def scaled_masked_softmax(x: Tensor, blocked_mask: Tensor, scale: float = 1.0) -> Tensor:
    """`softmax(x * scale)` over the last axis, with -10000 at masked places.

    Computed in float32, rounded once. A row whose places are all masked is uniform, not NaN.

    Args:
        x: `[B, N, S1, S2]`.
        blocked_mask: `[B or 1, N or 1, S1, S2]` bool, True = may not attend.

    Raises:
        OpsError: The mask does not fit.
    """
    fits = x.dim() == 4 and blocked_mask.dim() == 4 and blocked_mask.shape[2:] == x.shape[2:]
    if not fits or any(m not in (1, n) for m, n in zip(blocked_mask.shape[:2], x.shape[:2], strict=True)):
        raise OpsError(
            f"scaled_masked_softmax: mask {list(blocked_mask.shape)} does not fit x {list(x.shape)}. Give x [B, N, "
            "S1, S2] and a mask [B or 1, N or 1, S1, S2]."
        )
    if blocked_mask.dtype != torch.bool:
        raise OpsError(f"scaled_masked_softmax: mask has type {blocked_mask.dtype}. Give bool, True = may not attend.")
    result: Tensor = chosen("scaled_masked_softmax")(x, blocked_mask, scale)
    return result


@register("scaled_masked_softmax", "reference")
def scaled_masked_softmax_reference(x: Tensor, blocked_mask: Tensor, scale: float) -> Tensor:
    """The formula as written."""
    logits = (x.to(compute_dtype(x)) * scale).masked_fill(blocked_mask, BLOCKED_LOGIT)
    weights = (logits - logits.amax(dim=-1, keepdim=True)).exp()
    return (weights / weights.sum(dim=-1, keepdim=True)).to(x.dtype)


@case_of("scaled_masked_softmax")
def _case(inputs: Inputs) -> Case:
    def masked(x: Tensor) -> Tensor:
        blocked = torch.ones(1, 1, *x.shape[2:], dtype=torch.bool, device=x.device).triu(1)
        return scaled_masked_softmax(x, blocked, 0.5)

    return Case(masked, (inputs.normal(1, 2, inputs.tokens, inputs.tokens),))
