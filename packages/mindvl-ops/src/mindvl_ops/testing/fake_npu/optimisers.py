# SPDX-License-Identifier: Apache-2.0
"""npu_apply_adam_w, in place through `out`, and the limits of torch_npu.optim.NpuFusedAdamW."""

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


class NpuFusedAdamW(torch.optim.AdamW):
    """AdamW over combined buffers, with its limits: no bfloat16, no set_to_none, parameters stay where they are."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad, foreach=False)
        self._addresses: dict[Tensor, int] = {}

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Zero the gradients in place.

        Raises:
            ValueError: `set_to_none` is true: the combined gradients must stay.
        """
        if set_to_none:
            raise ValueError("set_to_none is not supported in fused optimizers")
        super().zero_grad(set_to_none=False)

    def step(self, closure: Any = None) -> Any:
        """One step over all parameters that have a gradient.

        Raises:
            TypeError: A parameter is neither float32 nor float16.
            RuntimeError: A gradient is sparse, or a parameter moved since the first step.
        """
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            if parameter.dtype not in (torch.float32, torch.float16):
                raise TypeError(f"NpuFusedAdamW takes float32 and float16, got {parameter.dtype}")
            if parameter.grad.is_sparse:
                raise RuntimeError("NpuFusedAdamW does not support sparse gradients")
            if self._addresses.setdefault(parameter, parameter.data_ptr()) != parameter.data_ptr():
                raise RuntimeError("NpuFusedAdamW: a parameter moved since its buffers were combined")
        return super().step(closure)
