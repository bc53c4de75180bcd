# SPDX-License-Identifier: Apache-2.0
"""Token permutation with gathers both ways, and grouped matmul on PyTorch's kernel where it has one."""

from typing import Any

import torch
from torch import Tensor

from ..grouped_matmul import GroupSizes, clear_padding, grouped_matmul_reference, host_sizes
from ..precision import compute_dtype
from ..registry import register
from ..staging import to_device
from .derivatives import gradients_of_reference, is_differentiated_again


@register("moe_permute", "torch")
def moe_permute_torch(tokens: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
    """A gather whose backward is a gather and a sum: nothing is added at random order."""
    order = experts.flatten().argsort(stable=True)
    slots = _inverse(order)
    permuted: Tensor = _Permute.apply(tokens, order, slots, experts.shape[1])
    return permuted, slots.int()


@register("moe_unpermute", "torch")
def moe_unpermute_torch(permuted: Tensor, slots: Tensor, weights: Tensor | None) -> Tensor:
    """Keeps the permuted rows as they came, not their float32 copy."""
    if weights is None:
        return permuted.index_select(0, slots)
    total: Tensor = _Unpermute.apply(permuted, slots.long(), weights)
    return total


@register("moe_permute_map", "torch")
def moe_permute_map_torch(
    tokens: Tensor, routing_map: Tensor, k: int, weights: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The map as expert numbers, found by a sort: no row is counted, so the host waits for nothing."""
    experts = _experts(routing_map, k)
    permuted, slots = moe_permute_torch(tokens, experts)
    if weights is None:
        return permuted, None, slots
    by_slot = weights.gather(1, experts).flatten()
    return permuted, by_slot.index_select(0, _inverse(slots.long())), slots


@register("moe_unpermute_map", "torch")
def moe_unpermute_map_torch(permuted: Tensor, slots: Tensor, routing_map: Tensor, weights: Tensor | None) -> Tensor:
    """As by expert numbers."""
    k = len(slots) // max(1, len(routing_map))
    if weights is None:
        chosen_weights = torch.ones(len(routing_map), k, dtype=permuted.dtype, device=permuted.device)
    else:
        chosen_weights = weights.gather(1, _experts(routing_map, k))
    return moe_unpermute_torch(permuted, slots, chosen_weights)


@register("grouped_matmul", "torch")
def grouped_matmul_torch(x: Tensor, weight: Tensor, sizes: GroupSizes) -> Tensor:
    """One kernel in bfloat16 on CUDA; elsewhere one matmul for each group, into its place."""
    product: Tensor = _GroupedMatmul.apply(x, weight, sizes)
    return product


def _experts(routing_map: Tensor, k: int) -> Tensor:
    """`[T, K]` numbers of the True places of each row, upwards."""
    return routing_map.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :k]


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, slots: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.k = k
        return tokens.index_select(0, order.div(k, rounding_mode="floor"))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (slots,) = ctx.saved_tensors
        rows = grad.index_select(0, slots).view(-1, ctx.k, grad.shape[1])
        return rows.sum(dim=1, dtype=compute_dtype(grad)).to(grad.dtype), None, None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, permuted: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(permuted, slots, weights)
        dtype = compute_dtype(permuted)
        rows = permuted.index_select(0, slots).view(*weights.shape, permuted.shape[1])
        return torch.einsum("tk,tkh->th", weights.to(dtype), rows.to(dtype)).to(permuted.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor]:
        permuted, slots, weights = ctx.saved_tensors
        dtype = compute_dtype(permuted)
        order = _inverse(slots)
        wide = grad.to(dtype)
        factor = weights.flatten().to(dtype).index_select(0, order)[:, None]
        spread = wide.index_select(0, order.div(weights.shape[1], rounding_mode="floor"))
        rows = permuted.index_select(0, slots).view(*weights.shape, permuted.shape[1])
        grad_weights = torch.einsum("th,tkh->tk", wide, rows.to(dtype))
        return spread.mul_(factor).to(permuted.dtype), None, grad_weights.to(weights.dtype)


class _GroupedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sizes: GroupSizes) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)  # a frozen weight keeps no rows
        ctx.given_sizes = sizes
        ctx.sizes = _bounds(sizes, x.device) if _one_kernel(x, weight) else host_sizes(sizes, len(x))
        return _by_rows(x, weight, ctx.sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if is_differentiated_again():  # autograd does not follow the writes into one result below
            if x is None:  # of the rows only the form matters
                x = grad.new_zeros(len(grad), weight.shape[1], requires_grad=True)
            return gradients_of_reference(grouped_matmul_reference, (x, weight, ctx.given_sizes), grad)
        grad = grad.contiguous()  # the kernel refuses the expanded gradient of a sum
        grad_x = _by_rows(grad, weight.transpose(1, 2), ctx.sizes) if ctx.needs_input_grad[0] else None
        grad_weight = _by_groups(x, grad, ctx.sizes, len(weight)) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None


def _one_kernel(x: Tensor, weight: Tensor) -> bool:
    """Whether PyTorch's grouped kernel takes these: bfloat16 on CUDA, rows of whole 16 bytes."""
    aligned = weight.shape[1] % 8 == 0 and weight.shape[2] % 8 == 0
    return x.device.type == "cuda" and x.dtype == torch.bfloat16 and aligned and len(x) > 0


def _bounds(sizes: GroupSizes, device: torch.device) -> Tensor:
    """Ends of the groups `[E]` int32 on the device, or `[E + 1]` with padding rows."""
    if not isinstance(sizes, Tensor):
        sizes = to_device(torch.tensor(sizes), device)
    return sizes.cumsum(0).to(torch.int32)


def _by_rows(x: Tensor, weight: Tensor, sizes: Tensor | list[int]) -> Tensor:
    """`[M, K]` and `[E, K, N]` -> `[M, N]`."""
    num_groups = len(weight)
    if isinstance(sizes, Tensor):
        product = torch._grouped_mm(x, weight, offs=sizes[:num_groups])
        return product if len(sizes) == num_groups else clear_padding(product, sizes[num_groups - 1])
    result = x.new_empty(len(x), weight.shape[2])
    pieces = result.split(sizes)
    for rows, w, out in zip(x.split(sizes)[:num_groups], weight, pieces[:num_groups], strict=True):
        if len(rows):
            torch.mm(rows, w, out=out)
    for padding in pieces[num_groups:]:
        padding.zero_()
    return result


def _by_groups(x: Tensor, grad: Tensor, sizes: Tensor | list[int], num_groups: int) -> Tensor:
    """`[M, K]` and `[M, N]` -> `[E, K, N]`."""
    if isinstance(sizes, Tensor):
        return torch._grouped_mm(x.t(), grad, offs=sizes[:num_groups])
    result = x.new_zeros(num_groups, x.shape[1], grad.shape[1])
    for rows, g, out in zip(x.split(sizes)[:num_groups], grad.split(sizes)[:num_groups], result, strict=True):
        if len(rows):
            torch.mm(rows.t(), g, out=out)
    return result
