# SPDX-License-Identifier: Apache-2.0
"""Tokens in the order of their experts, and back: contracts and references, by expert numbers and by routing map.

Comes after gating and before `grouped_matmul`, whose groups are the experts; the way back comes after it.
"""

import torch
from torch import Tensor

from .backend import chosen
from .cases import Case, Inputs, case_of, joined
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
            f"moe_permute: tokens {list(tokens.shape)} and experts {list(experts.shape)} do not agree. Give [T, H] "
            "and [T, K]."
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
    if (
        permuted.dim() != 2
        or slots.shape != permuted.shape[:1]
        or (weights is not None and (weights.dim() != 2 or weights.numel() != len(slots)))
    ):
        raise OpsError(
            f"moe_unpermute: permuted {list(permuted.shape)}, slots {list(slots.shape)}, weights "
            f"{(None if weights is None else list(weights.shape))} do not agree. Give [T*K, H], [T*K], [T, K]."
        )
    result: Tensor = chosen("moe_unpermute")(permuted, slots, weights)
    return result


def moe_permute_map(
    tokens: Tensor, routing_map: Tensor, k: int, weights: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """`moe_permute` from a map of who goes where.

    Args:
        tokens: `[T, H]`.
        routing_map: `[T, E]` bool, exactly `k` times True in each row. Checked on the CPU; on CUDA a wrong map stops
            the device at an assertion, without making the host wait; on an NPU it is the caller's responsibility.
        k: Experts of each token.
        weights: `[T, E]`; those of the map are permuted along.

    Returns:
        Permuted tokens `[T*K, H]`, their weights `[T*K]` or None, and slots `[T*K]` int32, where the experts of a token
        count upwards.

    Raises:
        OpsError: Shapes that do not agree, or a `k` that is not that of the map.
    """
    if (
        tokens.dim() != 2
        or routing_map.dim() != 2
        or len(tokens) != len(routing_map)
        or routing_map.dtype != torch.bool
    ):
        raise OpsError(
            f"moe_permute_map: tokens {list(tokens.shape)} and routing_map {list(routing_map.shape)} "
            f"{routing_map.dtype} do not agree. Give [T, H] and [T, E] bool."
        )
    _check_weights("moe_permute_map", weights, routing_map)
    _check_k(routing_map, k)
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
    if (
        permuted.dim() != 2
        or routing_map.dim() != 2
        or routing_map.dtype != torch.bool
        or slots.shape != permuted.shape[:1]
        or (len(slots) % len(routing_map) if len(routing_map) else len(slots))
    ):
        raise OpsError(
            f"moe_unpermute_map: permuted {list(permuted.shape)}, slots {list(slots.shape)}, routing_map "
            f"{list(routing_map.shape)} {routing_map.dtype} do not agree. Give [T*K, H], [T*K] and [T, E] bool."
        )
    _check_weights("moe_unpermute_map", weights, routing_map)
    result: Tensor = chosen("moe_unpermute_map")(permuted, slots, routing_map, weights)
    return result


def _check_weights(operator: str, weights: Tensor | None, routing_map: Tensor) -> None:
    if weights is not None and weights.shape != routing_map.shape:
        raise OpsError(
            f"{operator}: weights {list(weights.shape)} beside routing_map {list(routing_map.shape)}. Give one weight "
            "for each place of the map."
        )


def _check_k(routing_map: Tensor, k: int) -> None:
    if type(k) is not int or not 1 <= k <= routing_map.shape[1]:
        raise OpsError(f"moe_permute_map: k={k} of {routing_map.shape[1]} experts. Give 1 to {routing_map.shape[1]}.")
    if routing_map.device.type not in ("cpu", "cuda") or not len(routing_map):
        return
    is_right = (routing_map.sum(dim=1) == k).all()
    if routing_map.device.type == "cuda":
        torch._assert_async(is_right, "moe_permute_map: a row of routing_map does not have k experts")
    elif not is_right:
        counts = routing_map.sum(dim=1)
        token = int((counts != k).nonzero()[0, 0])
        raise OpsError(
            f"moe_permute_map: k={k}, but token {token} has {int(counts[token])} experts in routing_map. Give every "
            "token exactly k."
        )


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
    k = len(slots) // max(1, len(routing_map))
    rows = permuted[slots].to(compute_dtype(permuted)).view(len(routing_map), k, permuted.shape[1])
    if weights is not None:
        rows = rows * weights[routing_map].to(rows.dtype).view(*rows.shape[:2], 1)
    return rows.sum(dim=1).to(permuted.dtype)


_CASE_EXPERTS, _CASE_CHOSEN = 16, 2


def _case_routing(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Chosen experts `[T, K]`, and the same as a routing map `[T, E]`."""
    experts = torch.rand(inputs.tokens, _CASE_EXPERTS, generator=inputs.generator).argsort(dim=1)[:, :_CASE_CHOSEN]
    return experts, torch.zeros(inputs.tokens, _CASE_EXPERTS, dtype=torch.bool).scatter_(1, experts, True)


@case_of("moe_permute")
def _permute_case(inputs: Inputs) -> Case:
    experts, _ = _case_routing(inputs)
    tokens = inputs.normal(inputs.tokens, 4 * inputs.tokens)
    return Case(lambda x: moe_permute(x, experts.to(x.device))[0], (tokens,))


@case_of("moe_permute_map")
def _permute_map_case(inputs: Inputs) -> Case:
    _, routing_map = _case_routing(inputs)

    def permute(x: Tensor, weights: Tensor) -> Tensor:
        permuted, permuted_weights, _ = moe_permute_map(x, routing_map.to(x.device), _CASE_CHOSEN, weights)
        assert permuted_weights is not None
        return joined((permuted, permuted_weights))

    return Case(permute, (inputs.normal(inputs.tokens, 4 * inputs.tokens), inputs.normal(*routing_map.shape)))


@case_of("moe_unpermute")
def _unpermute_case(inputs: Inputs) -> Case:
    experts, _ = _case_routing(inputs)
    slots = experts.flatten().argsort(stable=True).argsort().int()
    tensors = (inputs.normal(experts.numel(), 4 * inputs.tokens), inputs.normal(*experts.shape))
    return Case(lambda x, w: moe_unpermute(x, slots.to(x.device), w), tensors)


@case_of("moe_unpermute_map")
def _unpermute_map_case(inputs: Inputs) -> Case:
    experts, routing_map = _case_routing(inputs)
    slots = routing_map.T.nonzero()[:, 1].argsort(stable=True).int()
    tensors = (inputs.normal(experts.numel(), 4 * inputs.tokens), inputs.normal(*routing_map.shape))
    return Case(lambda x, w: moe_unpermute_map(x, slots.to(x.device), routing_map.to(x.device), w), tensors)
