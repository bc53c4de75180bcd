# SPDX-License-Identifier: Apache-2.0
"""npu_cross_entropy_loss: logits `[N, C]`, targets `[N]` int64. Rules are those of the wheel's own document."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .elementwise import check_float
from .operators import operator
from .state import refuse, strict


def _rules(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    lse_square_scale_for_zloss: float,
    return_zloss: bool,
) -> None:
    op = "npu_cross_entropy_loss"
    check_float(op, "input", input)
    refuse(input.dim() != 2, f"{op}: input has rank {input.dim()}, must be [N, C]")
    rows, classes = input.shape
    refuse(not 0 < rows <= 200000, f"{op}: N = {rows} is outside 1 to 200000")
    refuse(target.dtype != torch.int64, f"{op}: target is {target.dtype}, must be int64")
    refuse(tuple(target.shape) != (rows,), f"{op}: target {list(target.shape)} must be [{rows}]")
    refuse(
        weight is not None and (weight.dtype != torch.float32 or tuple(weight.shape) != (classes,)),
        f"{op}: weight must be float32 [{classes}]",
    )
    refuse(reduction not in ("mean", "sum", "none"), f"{op}: reduction {reduction!r} is none of mean, sum, none")
    refuse(ignore_index >= classes, f"{op}: ignore_index {ignore_index} must be below C = {classes}")
    refuse(not 0.0 <= label_smoothing < 1.0, f"{op}: label_smoothing {label_smoothing} is outside [0, 1)")
    zloss = lse_square_scale_for_zloss != 0.0 or return_zloss
    refuse(zloss and strict().reserved_arguments, f"{op}: z-loss is reserved and not computed")
    ignores = ignore_index >= 0 or not strict().documented_limits  # "below 0: no label is ignored"
    valid = target[target != ignore_index] if ignores else target
    outside = valid.numel() > 0 and not 0 <= valid.min().item() <= valid.max().item() < classes
    refuse(outside, f"{op}: a target lies outside 0 to {classes - 1}; an ignore_index below 0 ignores none")
    if input.requires_grad and torch.is_grad_enabled():
        changed = label_smoothing != 0.0
        if reduction == "mean":
            changed = changed or weight is not None or ignore_index != -100
        refuse(
            changed and strict().documented_limits,
            f"{op}: with a gradient, reduction {reduction!r} takes no other argument than its default",
        )


@operator("npu_cross_entropy_loss", rules=_rules, learns=("input",), carries=(0, 2), uses=(0,))
def cross_entropy_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    lse_square_scale_for_zloss: float,
    return_zloss: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss [1] or [N], log probabilities, z-loss, its logsumexp), all in the type of input; the last two hold nothing.

    The wheel's meta kernel gives the last two a size although the document calls them empty.
    """
    log_prob = input.float().log_softmax(dim=-1)
    loss = F.cross_entropy(
        input.float(),
        target,
        weight,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    )
    loss = loss if reduction == "none" else loss.reshape(1)
    zloss = torch.full_like(loss.detach(), float("nan"), dtype=input.dtype)
    lse = torch.full_like(log_prob[:, 0].detach(), float("nan"), dtype=input.dtype)
    return loss.to(input.dtype), log_prob.to(input.dtype), zloss, lse
