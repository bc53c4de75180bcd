# SPDX-License-Identifier: Apache-2.0
"""Token permutation by indices and by routing map, with their inverses, and npu_moe_init_routing.

Sums over the experts of a token run in float32 and in slot order, with one rounding.
"""

from typing import Any

import torch
from torch import Tensor

from .elementwise import check_float
from .operators import operator
from .state import refuse, strict


def _check_tokens(op: str, tokens: Tensor) -> None:
    refuse(tokens.dim() != 2, f"{op}: tokens have rank {tokens.dim()}, must be [T, H]")
    refuse(tokens.numel() == 0 and strict().documented_limits, f"{op}: tokens {list(tokens.shape)} are empty")
    check_float(op, "tokens", tokens)


def _check_probs(op: str, probs: Tensor, tokens: Tensor) -> None:
    wide = probs.dtype == torch.float32 and tokens.dtype == torch.bfloat16
    refuse(probs.dtype != tokens.dtype and not wide, f"{op}: probs {probs.dtype} do not go with tokens {tokens.dtype}")


def _inverse(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse.int()


def _permute_rules(tokens: Tensor, indices: Tensor, num_out_tokens: int | None, padded_mode: bool) -> None:
    op = "npu_moe_token_permute"
    _check_tokens(op, tokens)
    refuse(padded_mode, f"{op}: padded_mode must be False")
    refuse(indices.dtype not in (torch.int32, torch.int64), f"{op}: indices are {indices.dtype}, not int32 or int64")
    refuse(indices.dim() not in (1, 2), f"{op}: indices have rank {indices.dim()}, must be [T] or [T, K]")
    refuse(len(indices) != len(tokens), f"{op}: {len(indices)} rows of indices for {len(tokens)} tokens")
    refuse(indices.dim() == 2 and indices.shape[1] > 512, f"{op}: K = {indices.shape[-1]} is above 512")
    refuse(indices.numel() >= 2**24 - 1, f"{op}: T*K = {indices.numel()} must be below 2**24 - 1")


@operator("npu_moe_token_permute", rules=_permute_rules, learns=("tokens",))
def token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None, padded_mode: bool
) -> tuple[Tensor, Tensor]:
    """(rows in expert order, sorted_indices int32: where each slot of each token went)."""
    total = indices.numel()
    slots = total // max(len(tokens), 1)
    count = num_out_tokens or total
    count = min(count, total) if count > 0 else total + count
    order = torch.argsort(indices.reshape(-1), stable=True)
    return tokens.float()[order // max(slots, 1)][:count].to(tokens.dtype), _inverse(order)


def _unpermute_rules(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None,
    padded_mode: bool,
    restore_shape: list[int] | None,
) -> None:
    op = "npu_moe_token_unpermute"
    _check_tokens(op, permuted_tokens)
    refuse(padded_mode, f"{op}: padded_mode must be False")
    refuse(restore_shape is not None, f"{op}: restore_shape must be None")
    _check_sorted(op, sorted_indices)
    if probs is not None:
        refuse(probs.dim() != 2, f"{op}: probs have rank {probs.dim()}, must be [T, K]")
        refuse(probs.numel() != len(sorted_indices), f"{op}: {probs.numel()} probs for {len(sorted_indices)} indices")
        _check_probs(op, probs, permuted_tokens)
    _check_inside(op, sorted_indices, len(permuted_tokens))


def _check_sorted(op: str, sorted_indices: Tensor) -> None:
    refuse(sorted_indices.dtype != torch.int32, f"{op}: sorted_indices are {sorted_indices.dtype}, must be int32")
    refuse(sorted_indices.dim() != 1, f"{op}: sorted_indices have rank {sorted_indices.dim()}, must be 1")


def _check_inside(op: str, indices: Tensor, rows: int) -> None:
    outside = indices.numel() > 0 and not 0 <= indices.min().item() <= indices.max().item() < rows
    refuse(outside, f"{op}: sorted_indices point outside {rows} rows")


@operator("npu_moe_token_unpermute", rules=_unpermute_rules, learns=("permuted_tokens", "probs"))
def token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None,
    padded_mode: bool,
    restore_shape: list[int] | None,
) -> Tensor:
    """`[T, H]`: rows back at their tokens, weighted by probs and summed over K."""
    slots = 1 if probs is None else probs.shape[1]
    rows = permuted_tokens.float()[sorted_indices.long()].unflatten(0, (-1, slots))  # [T, K, H]
    if probs is not None:
        rows = rows * probs.float()[..., None]
    return rows.sum(dim=1).to(permuted_tokens.dtype)


def _check_map(op: str, routing_map: Tensor, tokens: int) -> None:
    refuse(routing_map.dtype not in (torch.bool, torch.int8), f"{op}: routing_map is {routing_map.dtype}")
    refuse(
        routing_map.dim() != 2 or len(routing_map) != tokens,
        f"{op}: routing_map {list(routing_map.shape)} must be [{tokens}, E]",
    )


def _check_rows(op: str, routing_map: Tensor, slots: int) -> None:
    counts = routing_map.long().sum(dim=1)
    uneven = bool((counts != slots).any().item()) and strict().routing_rows
    refuse(uneven, f"{op}: every row of routing_map must have {slots} ones, there are rows with {counts.unique()}")


def _map_permute_rules(
    tokens: Tensor, routing_map: Tensor, probs: Tensor | None, num_out_tokens: int | None, drop_and_pad: bool
) -> None:
    op = "npu_moe_token_permute_with_routing_map"
    _check_tokens(op, tokens)
    _check_map(op, routing_map, len(tokens))
    if probs is not None:
        refuse(probs.shape != routing_map.shape, f"{op}: probs {list(probs.shape)} differ in shape from routing_map")
        _check_probs(op, probs, tokens)
    if drop_and_pad:
        capacity = (num_out_tokens or 0) // routing_map.shape[1]
        refuse(not 0 < capacity <= len(tokens), f"{op}: capacity {capacity} must be 1 to {len(tokens)}")
        return
    slots = (len(tokens) if num_out_tokens is None else num_out_tokens) // max(len(tokens), 1)
    refuse(slots >= 512, f"{op}: K = {slots} must be below 512")
    _check_rows(op, routing_map, slots)


def _slots_of_experts(routing_map: Tensor, capacity: int) -> Tensor:
    """`[E, capacity]` token of each slot: routed tokens first, ascending."""
    return torch.argsort(routing_map.T.long(), dim=1, descending=True, stable=True)[:, :capacity]


@operator(
    "npu_moe_token_permute_with_routing_map",
    rules=_map_permute_rules,
    learns=("tokens", "probs"),
    carries=(0, 1),
)
def token_permute_with_routing_map(
    tokens: Tensor, routing_map: Tensor, probs: Tensor | None, num_out_tokens: int | None, drop_and_pad: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(rows expert by expert, their probs or None, sorted_indices int32)."""
    num_tokens, num_experts = routing_map.shape
    count = num_tokens if num_out_tokens is None else num_out_tokens
    if drop_and_pad:
        chosen = _slots_of_experts(routing_map, count // num_experts)
        token_of_row, sorted_indices = chosen.flatten(), chosen.flatten().int()
        row_probs = None if probs is None else probs.float().T.gather(1, chosen).flatten()
    else:
        count = count // max(num_tokens, 1) * num_tokens
        expert, token = routing_map.T.bool().nonzero(as_tuple=True)
        token_of_row = token[:count]
        sorted_indices = torch.argsort(token_of_row, stable=True).int()
        row_probs = None if probs is None else probs.float()[token, expert][:count]
    rows = tokens.float()[token_of_row].to(tokens.dtype)
    return rows, row_probs if row_probs is None or probs is None else row_probs.to(probs.dtype), sorted_indices


def _map_unpermute_rules(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: list[int],
    probs: Tensor | None,
    routing_map: Tensor | None,
    drop_and_pad: bool,
) -> None:
    op = "npu_moe_token_unpermute_with_routing_map"
    _check_tokens(op, permuted_tokens)
    _check_sorted(op, sorted_indices)
    wanted = permuted_tokens.shape[1]
    refuse(
        len(restore_shape) != 2 or restore_shape[1] != wanted,
        f"{op}: restore_shape {restore_shape} must be [T, {wanted}]",
    )
    refuse(probs is not None and routing_map is None, f"{op}: probs need a routing_map")
    rows = len(permuted_tokens)
    refuse(len(sorted_indices) != rows, f"{op}: {len(sorted_indices)} sorted_indices for {rows} rows")
    _check_inside(op, sorted_indices, restore_shape[0] if drop_and_pad else rows)
    refuse(
        not drop_and_pad and restore_shape[0] > 0 and rows % restore_shape[0] != 0,
        f"{op}: {rows} rows are no multiple of {restore_shape[0]} tokens",
    )
    if routing_map is not None:
        _check_map(op, routing_map, restore_shape[0])
        if not drop_and_pad:
            _check_rows(op, routing_map, rows // max(restore_shape[0], 1))
    if probs is not None and routing_map is not None:
        refuse(probs.shape != routing_map.shape, f"{op}: probs {list(probs.shape)} differ in shape from routing_map")
        _check_probs(op, probs, permuted_tokens)


@operator("npu_moe_token_unpermute_with_routing_map", rules=_map_unpermute_rules, learns=("permuted_tokens", "probs"))
def token_unpermute_with_routing_map(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: list[int],
    probs: Tensor | None,
    routing_map: Tensor | None,
    drop_and_pad: bool,
) -> Tensor:
    """`restore_shape`: rows back at their tokens, weighted and summed."""
    num_tokens = restore_shape[0]
    wide = permuted_tokens.float()
    if drop_and_pad:
        if probs is not None and routing_map is not None:
            chosen = _slots_of_experts(routing_map, len(wide) // routing_map.shape[1])
            wide = wide * probs.float().T.gather(1, chosen).flatten()[:, None]
        zeros = torch.zeros(restore_shape, device=wide.device)
        return zeros.index_add(0, sorted_indices.long(), wide).to(permuted_tokens.dtype)
    rows = wide[sorted_indices.long()].view(num_tokens, -1, restore_shape[1])  # [T, K, H]
    if probs is not None and routing_map is not None:
        rows = rows * probs.float()[routing_map.bool()].view(num_tokens, -1, 1)
    return rows.sum(dim=1).to(permuted_tokens.dtype)


def _init_rules(x: Tensor, row_idx: Tensor, expert_idx: Tensor, **_: Any) -> None:
    op = "npu_moe_init_routing"
    _check_tokens(op, x)
    refuse(row_idx.dtype != torch.int32 or expert_idx.dtype != torch.int32, f"{op}: the indices must be int32")
    refuse(
        row_idx.shape != expert_idx.shape or row_idx.dim() != 2 or len(row_idx) != len(x),
        f"{op}: row_idx {list(row_idx.shape)} and expert_idx {list(expert_idx.shape)} must be [{len(x)}, K]",
    )


@operator("npu_moe_init_routing", rules=_init_rules)
def init_routing(x: Tensor, row_idx: Tensor, expert_idx: Tensor, active_num: int) -> tuple[Tensor, Tensor, Tensor]:
    """(rows in expert order, where each row index went, experts in order); the last two int32."""
    num_tokens, slots = row_idx.shape
    order = torch.argsort(expert_idx.reshape(-1), stable=True)
    source = row_idx.reshape(-1)[order].long()
    rows = x[source % num_tokens][: min(num_tokens, active_num) * slots]
    return rows, _inverse(source), expert_idx.reshape(-1)[order]
