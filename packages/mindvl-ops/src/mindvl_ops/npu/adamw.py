# SPDX-License-Identifier: Apache-2.0
"""AdamW on npu_apply_adam_w, one call for each parameter. Contract: NPU_CONTRACTS, section 9."""

from torch import Tensor

from ..errors import OpsError
from ..registry import register
from .extension import torch_npu


@register("adamw", "npu")
def adamw_npu(
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
    """The kernel is given `beta ** (step - 1)` and multiplies once more; powers of 0 switch the correction off."""
    beta1, beta2 = betas
    power1, power2 = (beta1 ** (step - 1), beta2 ** (step - 1)) if bias_correction else (0.0, 0.0)
    for param, grad, exp_avg, exp_avg_sq in zip(params, grads, exp_avgs, exp_avg_sqs, strict=True):
        if len({tensor.dtype for tensor in (param, grad, exp_avg, exp_avg_sq)}) > 1:
            raise OpsError(
                f"npu adamw: parameter {param.dtype}, gradient {grad.dtype}, moments {exp_avg.dtype} and "
                f"{exp_avg_sq.dtype}: the kernel takes one type. Keep float32 master weights and gradients."
            )
        if not decoupled:
            grad = grad.add(param, alpha=weight_decay)
        torch_npu().npu_apply_adam_w(
            power1,
            power2,
            lr,
            weight_decay if decoupled else 0.0,
            beta1,
            beta2,
            eps,
            grad,
            None,  # max_grad_norm, for amsgrad only
            False,
            False,
            out=(param, exp_avg, exp_avg_sq),
        )
