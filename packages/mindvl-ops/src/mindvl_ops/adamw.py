# SPDX-License-Identifier: Apache-2.0
"""AdamW: optimizer with the contract that megatron-core expects, over one update operator.

megatron-core wants the shape of Apex's and TransformerEngine's FusedAdam: `step` as an int in each parameter group
and only `exp_avg` and `exp_avg_sq` in the state of a parameter. torch's own AdamW keeps `step` in the state, and the
distributed optimizer then cannot load its checkpoint. Source: Loshchilov and Hutter, "Decoupled Weight Decay
Regularization", 2019.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .backend import chosen
from .errors import OpsError
from .registry import register


class AdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay.

    Args:
        adam_w_mode: Decoupled decay if True, else the decay is added to the gradient (plain Adam).
        bias_correction: Divide the moments by `1 - beta ** step`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        bias_correction: bool = True,
    ) -> None:
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise OpsError(
                f"lr={lr}, betas={betas}, eps={eps}, weight_decay={weight_decay} is out of range. AdamW. "
                "Use non-negative values and 0 <= beta < 1."
            )
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "bias_correction": bias_correction})
        self.adam_w_mode = bool(adam_w_mode)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; counts the step of each group, in the group."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] = int(group.get("step", 0)) + 1
            params = [param for param in group["params"] if param.grad is not None and param.numel()]
            for param in params:
                state = self.state[param]
                if "exp_avg" not in state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
            if params:
                self._update(group, params)
        return loss

    def _update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        chosen("adamw")(
            params,
            [param.grad for param in params],
            [self.state[param]["exp_avg"] for param in params],
            [self.state[param]["exp_avg_sq"] for param in params],
            step=group["step"],
            lr=float(group["lr"]),
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=self.adam_w_mode,
            bias_correction=group["bias_correction"],
        )


@register("adamw", "reference")
def adamw_reference(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    bias_correction: bool,
) -> None:
    """The paper's algorithm 2, one parameter at a time; `params`, `exp_avgs` and `exp_avg_sqs` are changed in place."""
    beta1, beta2 = betas
    correction1 = 1 - beta1**step if bias_correction else 1.0
    correction2 = 1 - beta2**step if bias_correction else 1.0
    for param, grad, exp_avg, exp_avg_sq in zip(params, grads, exp_avgs, exp_avg_sqs, strict=True):
        if decoupled:
            param.mul_(1 - lr * weight_decay)
        else:
            grad = grad + weight_decay * param
        exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)
        exp_avg_sq.mul_(beta2).add_(grad.square(), alpha=1 - beta2)
        param.sub_(lr * (exp_avg / correction1) / ((exp_avg_sq / correction2).sqrt() + eps))
