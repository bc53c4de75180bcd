# SPDX-License-Identifier: Apache-2.0
"""Which experts a token goes to, and with which weights: contract and reference.

Comes after the router's matmul, before `moe_permute`. Sources: softmax over all experts, then the best (Qwen3-MoE,
Mixtral); sigmoid with a bias that only chooses, limited to the best groups of experts (DeepSeek-V3, section 2.1.2,
whose bias replaces an auxiliary loss).
"""

from typing import Literal

import torch
from torch import Tensor

from .backend import chosen
from .cases import Case, Inputs, case_of
from .errors import OpsError
from .precision import compute_dtype
from .registry import register

Score = Literal["softmax", "sigmoid"]
EPSILON = 1e-20  # added to the sum of chosen sigmoids before the division


def moe_gating(
    logits: Tensor,
    k: int,
    *,
    score: Score,
    bias: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    renormalize: bool = True,
    scaling: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Choose `k` experts for each token.

    Scores are computed in float32. Experts are chosen by `score + bias`, among the `top_groups` groups whose two best
    sums are highest; of two equal ones the lower number goes first. Weights are the scores without the bias, rounded
    once (by the npu backend twice for softmax with `renormalize`).

    Args:
        logits: `[T, E]`.
        score: softmax over all experts, or sigmoid of each.
        bias: `[E]` in the type of `logits`; no gradient flows into it.
        num_groups: Equal groups of neighbouring experts.
        renormalize: Divide the chosen weights by their sum.
        scaling: Factor of the weights, after that.

    Returns:
        Weights `[T, K]` in the type of `logits`, from the best on, and experts `[T, K]` int32.

    Raises:
        OpsError: Sizes that do not fit.
    """
    if score not in ("softmax", "sigmoid"):
        raise OpsError(f"moe_gating: score {score!r:.40} is not known. Use softmax or sigmoid.")
    experts = logits.shape[-1] if logits.dim() else 0
    if logits.dim() != 2 or num_groups < 1 or experts % num_groups or not 1 <= top_groups <= num_groups:
        raise OpsError(
            f"moe_gating: logits {list(logits.shape)} in {num_groups} groups, best {top_groups}. Give [T, E], E a "
            "multiple of num_groups, and no more best groups than groups."
        )
    if not 1 <= k <= top_groups * experts // num_groups or (num_groups > 1 and experts // num_groups < 2):
        raise OpsError(
            f"moe_gating: k={k} of {top_groups} groups of {experts // num_groups} experts. Choose no more than there "
            "are, and give a group two experts at least."
        )
    if bias is not None and (bias.shape != (experts,) or bias.dtype != logits.dtype):
        raise OpsError(
            f"moe_gating: bias {list(bias.shape)} {bias.dtype} beside logits of {experts} experts, {logits.dtype}. "
            "Give one value for each expert, in the type of the logits."
        )
    result: tuple[Tensor, Tensor] = chosen("moe_gating")(
        logits, k, score, bias, num_groups, top_groups, renormalize, scaling
    )
    return result


def updated_expert_bias(bias: Tensor, tokens_per_expert: Tensor, rate: float) -> Tensor:
    """The bias of the next step: up by `rate` for experts with fewer tokens than the mean, down for those with more.

    Args:
        bias: `[E]`.
        tokens_per_expert: `[E]` counts of the whole global batch.
    """
    load = tokens_per_expert.to(bias.dtype)
    return bias + rate * torch.sign(load.mean() - load)


# PyTorch has no fused operator for this, and the few below are what one would write: the torch backend runs them too.
@register("moe_gating", "torch")
@register("moe_gating", "reference")
def moe_gating_reference(
    logits: Tensor,
    k: int,
    score: Score,
    bias: Tensor | None,
    num_groups: int,
    top_groups: int,
    renormalize: bool,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """Scores, groups, sort, gather."""
    wide = logits.to(compute_dtype(logits))
    scores = wide.softmax(dim=-1) if score == "softmax" else wide.sigmoid()
    choice = scores.detach() if bias is None else scores.detach() + bias.detach().to(scores.dtype)
    if num_groups > 1:
        grouped = choice.unflatten(1, (num_groups, -1))
        best = grouped.topk(2, dim=-1).values.sum(dim=-1).sort(dim=-1, descending=True, stable=True).indices
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best[:, :top_groups], True)
        choice = grouped.masked_fill(~kept[:, :, None], float("-inf")).flatten(1)
    experts = choice.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(1, experts)
    if renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + EPSILON)
    return (weights * scaling).to(logits.dtype), experts.int()


@case_of("moe_gating")
def _case(inputs: Inputs) -> Case:
    def gate(logits: Tensor, bias: Tensor) -> Tensor:
        weights, experts = moe_gating(
            logits, 2, score="sigmoid", bias=bias.detach(), num_groups=4, top_groups=2, scaling=2.5
        )
        return weights + 0 * experts.sum()  # the order of the weights shows which experts were chosen

    return Case(gate, (inputs.normal(inputs.tokens, 16), inputs.normal(16)))
