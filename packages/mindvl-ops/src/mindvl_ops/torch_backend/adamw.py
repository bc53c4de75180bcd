# SPDX-License-Identifier: Apache-2.0
"""AdamW update on PyTorch's fused kernel, or on multi-tensor operators where the kernel does not do what is asked."""

import torch
from torch import Tensor
from torch.optim.adam import adam

from ..registry import register


@register("adamw", "torch")
def adamw_torch(
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
    """One fused kernel over all parameters of a group."""
    beta1, beta2 = betas
    if not bias_correction:
        _without_bias_correction(
            params, grads, exp_avgs, exp_avg_sqs, lr, beta1, beta2, eps, weight_decay, decoupled=decoupled
        )
        return
    # The kernel counts upwards, in place, what it is given: one count per parameter, made by one launch without a copy
    # from the host. The parameters of a group are on one device.
    steps = list(torch.full((len(params),), float(step - 1), device=params[0].device).unbind())
    adam(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        steps,
        fused=True,
        decoupled_weight_decay=decoupled,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=lr,
        weight_decay=weight_decay,
        eps=eps,
        maximize=False,
    )


def _without_bias_correction(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    *,
    decoupled: bool,
) -> None:
    if decoupled:
        torch._foreach_mul_(params, 1 - lr * weight_decay)
    else:
        grads = list(torch._foreach_add(grads, params, alpha=weight_decay))
    torch._foreach_lerp_(exp_avgs, grads, 1 - beta1)
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - beta2)
    denominators = torch._foreach_sqrt(exp_avg_sqs)
    torch._foreach_add_(denominators, eps)
    torch._foreach_addcdiv_(params, exp_avgs, denominators, -lr)
