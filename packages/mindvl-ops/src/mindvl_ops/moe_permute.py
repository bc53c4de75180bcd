# SPDX-License-Identifier: Apache-2.0
"""Tokens in the order of their experts, and back: contracts and references, by expert numbers and by routing map.

Comes after gating and before `grouped_matmul`, whose groups are the experts; the way back comes after it.
"""

import torch
from torch import Tensor

from .backend import chosen
from .errors import OpsError
from .precision import compute_dtype
from .registry import register


def moe_permute(tokens: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
    """Copy each token once for each of its experts, in the order of the experts; inside an expert in the order it came.

    Args:
        tokens: `[T, H]`.
        experts: `[T, K]` int32 or int64.

    Returns:
        Permuted tokens `[T*K, H]` and slots `[T*K]` int32: `permuted[slots[t * K + k]]` is token `t` for its k-th
        expert.
    """
    if tokens.dim() != 2 or experts.dim() != 2 or len(tokens) != len(experts):
        raise OpsError(
            f"tokens {list(tokens.shape)} and experts {list(experts.shape)} do not agree. moe_permute. Give [T, H] and "
            "[T, K]."
        )
    result: tuple[Tensor, Tensor] = chosen("moe_permute")(tokens, experts)
    return result


def moe_unpermute(permuted: Tensor, slots: Tensor, weights: Tensor | None = None) -> Tensor:
    """Sum of the results of a token's experts, each times its weight; float32 inside, rounded once.

    Args:
        permuted: `[T*K, H]`, results in the order of the experts.
        slots: `[T*K]` int32 from `moe_permute`.
        weights: `[T, K]`; without them K is 1 and rows are only put back.

    Returns:
        `[T, H]` in the type of `permuted`.
    """
    if slots.shape != permuted.shape[:1] or (weights is not None and weights.numel() != len(slots)):
        raise OpsError(
            f"permuted {list(permuted.shape)}, slots {list(slots.shape)}, weights "
            f"{None if weights is None else list(weights.shape)} do not agree. moe_unpermute. Give [T*K, H], [T*K], "
            "[T, K]."
        )
    result: Tensor = chosen("moe_unpermute")(permuted, slots, weights)
    return result


def moe_permute_map(
    tokens: Tensor, routing_map: Tensor, k: int, weights: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """`moe_permute` from a map of who goes where.

    Args:
        tokens: `[T, H]`.
        routing_map: `[T, E]` bool, exactly `k` times True in each row (not checked: that would wait for the device).
        weights: `[T, E]`; those of the map are permuted along.

    Returns:
        Permuted tokens `[T*K, H]`, their weights `[T*K]` or None, and slots `[T*K]` int32, where the experts of a token
        count upwards.
    """
    if (
        tokens.dim() != 2
        or routing_map.dim() != 2
        or len(tokens) != len(routing_map)
        or routing_map.dtype != torch.bool
    ):
        raise OpsError(
            f"tokens {list(tokens.shape)} and routing_map {list(routing_map.shape)} {routing_map.dtype} do not agree. "
            "moe_permute_map. Give [T, H] and [T, E] bool."
        )
    result: tuple[Tensor, Tensor | None, Tensor] = chosen("moe_permute_map")(tokens, routing_map, k, weights)
    return result


def moe_unpermute_map(permuted: Tensor, slots: Tensor, routing_map: Tensor, weights: Tensor | None = None) -> Tensor:
    """`moe_unpermute` for slots of `moe_permute_map`.

    Args:
        permuted: `[T*K, H]`.
        routing_map: `[T, E]` bool.
        weights: `[T, E]`; all 1 if not given (where they were put on inside of the experts).

    Returns:
        `[T, H]` in the type of `permuted`; float32 inside, rounded once.
    """
    result: Tensor = chosen("moe_unpermute_map")(permuted, slots, routing_map, weights)
    return result


@register("moe_permute", "reference")
def moe_permute_reference(tokens: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
    """A stable sort of the expert numbers, and its inverse."""
    order = experts.flatten().argsort(stable=True)
    return tokens[order // experts.shape[1]], order.argsort().int()


@register("moe_unpermute", "reference")
def moe_unpermute_reference(permuted: Tensor, slots: Tensor, weights: Tensor | None) -> Tensor:
    """Gather, weigh, sum."""
    rows = permuted[slots].to(compute_dtype(permuted))
    if weights is None:
        return rows.to(permuted.dtype)
    return (rows.unflatten(0, weights.shape) * weights.to(rows.dtype)[:, :, None]).sum(dim=1).to(permuted.dtype)


@register("moe_permute_map", "reference")
def moe_permute_map_reference(
    tokens: Tensor, routing_map: Tensor, k: int, weights: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The places of the transposed map, row by row."""
    source = routing_map.T.nonzero()[:, 1]
    assert len(source) == k * len(tokens), "a row of routing_map has not k places"
    permuted_weights = None if weights is None else weights.T[routing_map.T]
    return tokens[source], permuted_weights, source.argsort(stable=True).int()


@register("moe_unpermute_map", "reference")
def moe_unpermute_map_reference(permuted: Tensor, slots: Tensor, routing_map: Tensor, weights: Tensor | None) -> Tensor:
    """Gather, weigh, sum."""
    rows = permuted[slots].to(compute_dtype(permuted)).view(routing_map.shape[0], -1, permuted.shape[1])
    if weights is not None:
        rows = rows * weights[routing_map].to(rows.dtype).view(*rows.shape[:2], 1)
    return rows.sum(dim=1).to(permuted.dtype)
