# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts on torch_npu: gating, permutation, grouped matmul with a backward pass of our own.

Contract: NPU_CONTRACTS, sections 7 and 8. npu_grouped_matmul has no autograd kernel: called alone it would warn once
and then give no gradient at all. Its sizes may add up to less than the rows (aclnnGroupedMatmulV4, groupListOptional:
what it does not name is not updated). The kernels take no empty tensor: without tokens the references run, which PyTorch's
own operators compute on every device (a rank of experts that no token chose has none).
"""

from typing import Any

import torch
from torch import Tensor

from ..errors import OpsError
from ..grouped_matmul import GroupSizes, clear_padding, grouped_matmul_reference
from ..moe_gating import EPSILON, Score, moe_gating_reference
from ..moe_permute import (
    moe_permute_map_reference,
    moe_permute_reference,
    moe_unpermute_map_reference,
    moe_unpermute_reference,
)
from ..precision import compute_dtype
from ..registry import register
from ..staging import to_device
from ..torch_backend.derivatives import gradients_of_reference, is_differentiated_again, without_second_derivative
from .extension import torch_npu

MAX_EXPERTS = 2048
LEAST_GROUP = 3  # as documented; the kernel's code accepts 2
MAX_CHOSEN = 512
MAX_GROUPS = 1024
MAX_INNER = 65535


@register("moe_gating", "npu")
def moe_gating_npu(
    logits: Tensor,
    k: int,
    score: Score,
    bias: Tensor | None,
    num_groups: int,
    top_groups: int,
    renormalize: bool,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """One kernel; only for sigmoid does it divide by the sum itself, and then always."""
    experts = logits.shape[1]
    if experts > MAX_EXPERTS or (num_groups > 1 and num_groups * -(-(experts // num_groups) // 32) * 32 > MAX_EXPERTS):
        raise OpsError(
            f"npu moe_gating: {experts} experts in {num_groups} groups: the kernel takes {MAX_EXPERTS}, each group "
            "filled up to multiples of 32. Choose backend torch for it."
        )
    if num_groups > 1 and experts // num_groups < LEAST_GROUP:
        raise OpsError(
            f"npu moe_gating: groups of {experts // num_groups} experts: the kernel needs at least {LEAST_GROUP}. "
            "Choose backend torch for it."
        )
    if score == "sigmoid" and not renormalize:
        raise OpsError(
            "npu moe_gating: sigmoid scores without renormalize: the kernel always divides by their sum. Choose "
            "backend torch for it."
        )
    if not len(logits):
        return moe_gating_reference(logits, k, score, bias, num_groups, top_groups, renormalize, scaling)
    divide_here = score == "softmax" and renormalize
    weights, chosen, _ = torch_npu().npu_moe_gating_top_k(
        logits,
        k,
        bias=None if bias is None else bias.detach(),
        k_group=top_groups,
        group_count=num_groups,
        group_select_mode=1 if num_groups > 1 else 0,
        renorm=0,
        norm_type=1 if score == "sigmoid" else 0,
        out_flag=False,
        routed_scaling_factor=1.0 if divide_here else scaling,
        eps=EPSILON,
    )
    weights = without_second_derivative(weights, "npu moe_gating")
    if divide_here:
        wide = weights.to(compute_dtype(weights))
        weights = (wide / (wide.sum(dim=-1, keepdim=True) + EPSILON) * scaling).to(logits.dtype)
    return weights, chosen


@register("moe_permute", "npu")
def moe_permute_npu(tokens: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
    """One kernel, with torch_npu's own backward."""
    _check_chosen(experts.shape[1], "moe_permute")
    if not len(tokens):
        return moe_permute_reference(tokens, experts)
    permuted, slots = torch_npu().npu_moe_token_permute(tokens, experts)
    return without_second_derivative(permuted, "npu moe_permute"), slots


@register("moe_unpermute", "npu")
def moe_unpermute_npu(permuted: Tensor, slots: Tensor, weights: Tensor | None) -> Tensor:
    """One kernel, with torch_npu's own backward."""
    if not len(permuted):
        return moe_unpermute_reference(permuted, slots, weights)
    total: Tensor = torch_npu().npu_moe_token_unpermute(permuted, slots, weights)
    return without_second_derivative(total, "npu moe_unpermute")


@register("moe_permute_map", "npu")
def moe_permute_map_npu(
    tokens: Tensor, routing_map: Tensor, k: int, weights: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """One kernel; its default for num_out_tokens assumes one expert per token, so it is always passed."""
    _check_chosen(k, "moe_permute_map")
    if not len(tokens):
        return moe_permute_map_reference(tokens, routing_map, k, weights)
    permuted, permuted_weights, slots = torch_npu().npu_moe_token_permute_with_routing_map(
        tokens, routing_map, probs=weights, num_out_tokens=k * len(tokens), drop_and_pad=False
    )
    permuted = without_second_derivative(permuted, "npu moe_permute_map")
    return permuted, None if weights is None else permuted_weights, slots


@register("moe_unpermute_map", "npu")
def moe_unpermute_map_npu(permuted: Tensor, slots: Tensor, routing_map: Tensor, weights: Tensor | None) -> Tensor:
    """One kernel, with torch_npu's own backward."""
    if not len(permuted):
        return moe_unpermute_map_reference(permuted, slots, routing_map, weights)
    total: Tensor = torch_npu().npu_moe_token_unpermute_with_routing_map(
        permuted,
        slots,
        [len(routing_map), permuted.shape[1]],
        probs=weights,
        routing_map=None if weights is None else routing_map,
        drop_and_pad=False,
    )
    return without_second_derivative(total, "npu moe_unpermute_map")


@register("grouped_matmul", "npu")
def grouped_matmul_npu(x: Tensor, weight: Tensor, sizes: GroupSizes) -> Tensor:
    """Three calls of npu_grouped_matmul: forward, and one for each gradient."""
    if max(weight.shape[1:]) > MAX_INNER or len(weight) > MAX_GROUPS:
        raise OpsError(
            f"npu grouped_matmul: {len(weight)} matrices of {list(weight.shape[1:])}: the kernel takes {MAX_GROUPS}, "
            f"of sides up to {MAX_INNER}. Cut them over more ranks."
        )
    if not isinstance(sizes, Tensor):
        sizes = to_device(torch.tensor(sizes, dtype=torch.int64), x.device)
    if not len(x):  # the kernel takes no empty tensor
        return x.new_zeros(0, weight.shape[2]) + 0 * weight.sum()
    product: Tensor = _GroupedMatmul.apply(x, weight, sizes)
    return product


class _GroupedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sizes: Tensor) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, sizes)  # a frozen weight keeps no rows
        return _by_rows(x.contiguous(), weight, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, sizes = ctx.saved_tensors
        if is_differentiated_again():  # the kernel has no derivative: autograd would silently leave it out
            if x is None:  # of the rows only the form matters
                x = grad.new_zeros(len(grad), weight.shape[1], requires_grad=True)
            return gradients_of_reference(grouped_matmul_reference, (x, weight, sizes), grad)
        grad = grad.contiguous()
        grad_x = _by_rows(grad, weight.transpose(1, 2), sizes) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:  # the rows of x must come as a transposed view
            (grad_weight,) = torch_npu().npu_grouped_matmul(
                [x.contiguous().t()],
                [grad],
                group_list=sizes[: len(weight)],
                split_item=3,
                group_type=2,
                group_list_type=1,
            )
        return grad_x, grad_weight, None


def _by_rows(x: Tensor, weight: Tensor, sizes: Tensor) -> Tensor:
    """`[M, K]` and `[E, K, N]` -> `[M, N]`; the kernel does not write the rows after the last group."""
    own = sizes[: len(weight)]
    (product,) = torch_npu().npu_grouped_matmul(
        [x], [weight], group_list=own, split_item=2, group_type=0, group_list_type=1
    )
    result: Tensor = product
    return result if len(sizes) == len(weight) else clear_padding(result, own.sum())


def _check_chosen(k: int, operator: str) -> None:
    if k > MAX_CHOSEN:
        raise OpsError(f"npu {operator}: {k} experts for a token: the kernel takes {MAX_CHOSEN}. Choose fewer.")
