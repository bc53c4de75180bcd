# SPDX-License-Identifier: Apache-2.0
"""npu_apply_adam_w, in place through `out`."""

from typing import Any

import torch
from torch import Tensor

from .elementwise import check_float
from .operators import operator
from .state import RefusedError, refuse, strict


def _no_out(**_: Any) -> None:
    raise RefusedError("npu_apply_adam_w: call it with out=(var, m, v); without it there is nothing to update")


@operator("npu_apply_adam_w", rules=_no_out)
def apply_adam_w(**_: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Never reached: the rule refuses every call."""
    raise AssertionError("the rule refuses every call")


def _rules(grad: Tensor, amsgrad: bool | None, max_grad_norm: Tensor | None, out: list[Tensor], **_: Any) -> None:
    op = "npu_apply_adam_w"
    refuse(len(out) != 3, f"{op}: out must be (var, m, v), got {len(out)} tensors")
    check_float(op, "grad", grad)
    for name, tensor in zip(("var", "m", "v"), out, strict=True):
        refuse(
            tensor.dtype != grad.dtype, f"{op}: {name} is {tensor.dtype}, grad is {grad.dtype}: all must be one type"
        )
        refuse(tensor.shape != grad.shape, f"{op}: {name} {list(tensor.shape)} has another shape than grad")
    refuse(bool(amsgrad) and strict().documented_limits, f"{op}: amsgrad must be False on this device")
    refuse(bool(amsgrad) and max_grad_norm is None, f"{op}: amsgrad needs max_grad_norm")


@operator("npu_apply_adam_w.out", rules=_rules)
def apply_adam_w_out(
    beta1_power: float,
    beta2_power: float,
    lr: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    grad: Tensor,
    max_grad_norm: Tensor | None,
    amsgrad: bool | None,
    maximize: bool | None,
    out: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """One step; the powers are those of the step before: beta ** (t - 1)."""
    var, m, v = out
    gradient = -grad.float() if maximize else grad.float()
    first = beta1 * m.float() + (1 - beta1) * gradient
    second = beta2 * v.float() + (1 - beta2) * gradient.square()
    largest = second
    if amsgrad and max_grad_norm is not None:
        largest = torch.maximum(second, max_grad_norm.float())
        max_grad_norm.copy_(largest)
    denominator = (largest / (1 - beta2_power * beta2)).sqrt() + epsilon
    decayed = var.float() * (1 - lr * weight_decay)
    var.copy_(decayed - lr * (first / (1 - beta1_power * beta1)) / denominator)
    m.copy_(first)
    v.copy_(second)
    return var, m, v
