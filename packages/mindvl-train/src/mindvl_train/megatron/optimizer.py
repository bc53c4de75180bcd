# SPDX-License-Identifier: Apache-2.0
"""Gradient buffers and the distributed optimizer around a model.

Comes after the model is built and loaded, before the first step. The distributed optimizer is always used, also for one
process, so that a checkpoint can be loaded on any number of processes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from megatron.core.optimizer_param_scheduler import ParamGroupOverride
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import unwrap_model
from torch import Tensor

from mindvl_model.megatron.share import global_name
from mindvl_train.config import OptimizerConfig


def wrap_models(models: Sequence[torch.nn.Module], *, overlap: bool = False) -> list[torch.nn.Module]:
    """Wrap every chunk in gradient buffers that are reduced over ranks with the same weights.

    Args:
        overlap: Reduce gradients and gather parameters while layers compute.
    """
    wrapped: list[torch.nn.Module] = []
    for number, model in enumerate(models):
        config: Any = model.config
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=True,
            overlap_grad_reduce=overlap,
            overlap_param_gather=overlap,
        )
        inner = Float16Module(config, model) if config.bf16 else model
        # Only the first chunk needs buckets: gradients of the others are reduced while it computes.
        wrapped.append(DistributedDataParallel(config, ddp_config, inner, disable_bucketing=number > 0))
    return wrapped


def release(wrapped: Sequence[Any]) -> None:
    """Break reference cycles, so that models and optimizer can be garbage collected.

    Autograd nodes reference the models through hooks, slices of the optimizer reference the nodes, and the configuration
    of the models references the optimizer: a cycle through C++ that the garbage collector cannot detect.
    """
    for chunk in wrapped:
        chunk.grad_accs.clear()
        chunk.config.grad_scale_func = chunk.config.finalize_model_grads_func = None


def build_optimizer(
    wrapped: Sequence[torch.nn.Module],
    config: OptimizerConfig,
    *,
    rate_factor: Callable[[str], float] = lambda param_name: 1.0,
) -> Any:
    """AdamW over the trained parameters, without weight decay for vectors (norms and biases).

    Args:
        rate_factor: Learning rate of a parameter, by its name in the whole model, divided by that of the schedule.
    """
    shared: Any = wrapped[0].config
    options = MegatronOptimizerConfig(
        optimizer="adam",
        lr=0.0,  # set before every step
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_eps=config.epsilon,
        clip_grad=config.clip_grad_norm,
        bf16=shared.bf16,
        params_dtype=shared.params_dtype,
        use_distributed_optimizer=True,
    )
    optimizer = get_megatron_optimizer(
        options,
        list(wrapped),
        config_overrides=get_standard_config_overrides(options) | _rate_overrides(wrapped, rate_factor),
        use_gloo_process_groups=False,  # only for checkpoints that mindvl does not use
    )
    for part in optimizer.chained_optimizers:
        if not part.is_stub_optimizer:
            # Not megatron-core's own offload, which uses torch's Adam on the host; our checkpoints do not support its state.
            part.optimizer.host_state = config.offload
    return optimizer


def _rate_overrides(wrapped: Sequence[Any], rate_factor: Callable[[str], float]) -> dict[ParamKey, ParamGroupOverride]:
    """One override for each learning rate that differs from that of the schedule."""
    by_factor: dict[float, set[int]] = {}
    for chunk in wrapped:
        model = unwrap_model(chunk)
        for name, parameter in model.named_parameters():
            factor = rate_factor(global_name(model, name))
            if factor != 1:
                by_factor.setdefault(factor, set()).add(id(parameter))

    def key(factor: float, members: set[int]) -> ParamKey:
        return ParamKey(predicate=ParamPredicate(name=f"rate {factor}", fn=lambda parameter: id(parameter) in members))

    # A field of megatron-core's parameter groups that its own code does not read.
    return {key(factor, members): {"lr_mult": factor} for factor, members in by_factor.items()}


@torch.no_grad()
def squared_norm(optimizer: Any) -> Tensor:
    """Prepare the gradients of forward_backward for the update; the sum of squares of this rank's share of them.

    The norm over all ranks is the square root of the sum over all ranks. The values are those of megatron-core, whose
    own implementation reads the norm of every tensor on the host.

    Returns:
        float32 scalar on the device.
    """
    optimizer.prepare_grads()  # returns whether a gradient is infinite, always False without a loss scale
    gradients = [gradient for part in optimizer.chained_optimizers for gradient in part.get_main_grads_for_grad_norm()]
    if not gradients:  # only replicas of parameters that other ranks count
        return torch.zeros((), device="cuda")  # the literal of the device setup
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(one) for one in gradients])) ** 2


@torch.no_grad()
def update(optimizer: Any, learning_rate: float, norm: float) -> None:
    """Clip and apply the gradients of forward_backward.

    Args:
        norm: Norm of the gradients over all ranks.
    """
    if optimizer.config.clip_grad > 0:
        for part in optimizer.chained_optimizers:
            clip_grad_by_total_norm_fp32(part.get_parameters(), optimizer.config.clip_grad, norm)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["lr_mult"]
        # megatron-core stores wd_mult and applies it in its own scheduler, which is not used here.
        group["weight_decay"] = optimizer.config.weight_decay * group["wd_mult"]
    optimizer.step_with_ready_grads()
