# SPDX-License-Identifier: Apache-2.0
"""Top-k gating: npu_moe_gating_top_k (softmax or sigmoid, groups, bias, hash routing) and the plain softmax form."""

import torch
from torch import Tensor

from .elementwise import check_float
from .operators import operator
from .state import refuse, strict


def _rules(
    x: Tensor,
    k: int,
    bias: Tensor | None,
    input_ids: Tensor | None,
    tid2eid: Tensor | None,
    k_group: int,
    group_count: int,
    group_select_mode: int,
    renorm: int,
    norm_type: int,
    out_flag: bool,
    routed_scaling_factor: float,
    eps: float,
) -> None:
    op = "npu_moe_gating_top_k"
    refuse(x.dim() != 2, f"{op}: x has rank {x.dim()}, must be [T, E]")
    check_float(op, "x", x)
    experts = x.shape[1]
    refuse(experts > 2048, f"{op}: E = {experts} is above 2048")
    refuse(
        bias is not None and (bias.dtype != x.dtype or tuple(bias.shape) != (experts,)),
        f"{op}: bias must be {x.dtype} [{experts}]",
    )
    refuse(renorm != 0, f"{op}: renorm must be 0, got {renorm}")
    refuse(norm_type not in (0, 1), f"{op}: norm_type {norm_type} is neither 0 (softmax) nor 1 (sigmoid)")
    refuse(group_select_mode not in (0, 1), f"{op}: group_select_mode {group_select_mode} is neither 0 nor 1")
    refuse((input_ids is None) != (tid2eid is None), f"{op}: input_ids and tid2eid go together")
    refuse(group_count < 1 or experts % group_count != 0, f"{op}: {group_count} groups do not divide {experts} experts")
    refuse(not 1 <= k_group <= group_count, f"{op}: k_group {k_group} is outside 1 to {group_count}")
    size = experts // group_count
    refuse(not 1 <= k <= k_group * size, f"{op}: k = {k} is outside 1 to {k_group * size}")
    if group_count > 1:
        least = 3 if strict().documented_limits else 1 + group_select_mode
        refuse(size < least, f"{op}: groups of {size} experts, at least {least} are needed")
        padded = group_count * ((size + 31) // 32 * 32)
        refuse(padded > 2048, f"{op}: groups padded to 32 make {padded}, above 2048")


@operator("npu_moe_gating_top_k", rules=_rules, learns=("x",))
def gating_top_k(
    x: Tensor,
    k: int,
    bias: Tensor | None,
    input_ids: Tensor | None,
    tid2eid: Tensor | None,
    k_group: int,
    group_count: int,
    group_select_mode: int,
    renorm: int,
    norm_type: int,
    out_flag: bool,
    routed_scaling_factor: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(weights [T, k] in the type of x, experts int32 [T, k], scores float32 [T, E], NaN unless out_flag)."""
    wide = x.float()
    scores = wide.sigmoid() if norm_type == 1 else wide.softmax(dim=-1)
    selecting = scores.detach() if bias is None else scores.detach() + bias.float()
    if input_ids is not None and tid2eid is not None:
        experts = tid2eid[input_ids.long()][:, :k].long()
    else:
        if group_count > 1:
            selecting = _group_limited(selecting, group_count, k_group, group_select_mode)
        experts = selecting.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(1, experts)
    if norm_type == 1:  # softmax is not renormalised
        weights = weights / (weights.sum(dim=-1, keepdim=True) + eps)
    weights = (weights * routed_scaling_factor).to(x.dtype)
    shown = scores if out_flag else torch.full_like(scores, float("nan"))
    return weights, experts.int(), shown


def _group_limited(selecting: Tensor, group_count: int, k_group: int, mode: int) -> Tensor:
    """Scores with every group but the best `k_group` at minus infinity."""
    groups = selecting.unflatten(1, (group_count, -1))  # [T, G, E/G]
    best = groups.amax(dim=-1) if mode == 0 else groups.topk(2, dim=-1).values.sum(dim=-1)
    kept = best.sort(dim=-1, descending=True, stable=True).indices[:, :k_group]
    lost = torch.ones_like(best, dtype=torch.bool).scatter(1, kept, False)
    return groups.masked_fill(lost[..., None], float("-inf")).flatten(1)


def _softmax_rules(x: Tensor, finished: Tensor | None, k: int) -> None:
    op = "npu_moe_gating_top_k_softmax"
    refuse(x.dim() not in (2, 3), f"{op}: x has rank {x.dim()}, must be 2 or 3")
    check_float(op, "x", x)
    most = min(x.shape[-1], 1024)
    refuse(not 1 <= k <= most, f"{op}: k = {k} is outside 1 to {most}")
    refuse(
        finished is not None and (finished.dtype != torch.bool or finished.shape != x.shape[:-1]),
        f"{op}: finished must be bool {list(x.shape[:-1])}",
    )


@operator("npu_moe_gating_top_k_softmax", rules=_softmax_rules, derivative="raises")
def gating_top_k_softmax(x: Tensor, finished: Tensor | None, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """(weights, experts int32, row_idx int32 counted column by column); a finished token gets expert E."""
    values, experts = x.float().softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    values, experts = values[..., :k], experts[..., :k]
    if finished is not None:
        experts = experts.masked_fill(finished[..., None], x.shape[-1])
    rows = x.numel() // x.shape[-1]
    row_idx = torch.arange(rows * k, device=x.device, dtype=torch.int32).view(k, rows).T.reshape(experts.shape)
    return values.to(x.dtype), experts.int(), row_idx.contiguous()
