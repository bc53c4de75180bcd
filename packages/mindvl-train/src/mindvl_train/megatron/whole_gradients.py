# SPDX-License-Identifier: Apache-2.0
"""Gradient buffers with the complete gradients of this rank's parameters, for checks.

Used instead of those of optimizer.py, which leave a slice on each data-parallel rank; the schedules are those of training.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch import Tensor

from mindvl_model import MindVLModel
from mindvl_model.megatron.share import global_name


def with_whole_gradients(models: Sequence[MindVLModel]) -> list[torch.nn.Module]:
    """Wrap every chunk in gradient buffers that are summed over ranks with the same weights."""
    wrapped: list[torch.nn.Module] = []
    for model in models:
        config: Any = model.config
        wrapped.append(DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model))
    return wrapped


def take_gradients(models: Sequence[torch.nn.Module]) -> dict[str, Tensor]:
    """Copies of the gradients by global parameter name; the buffers are zeroed."""
    taken: dict[str, Tensor] = {}
    for model in models:
        inner: Any = model.module
        for name, parameter in inner.named_parameters():
            if parameter.requires_grad:
                taken[global_name(inner, name)] = parameter.main_grad.detach().clone()
        model.zero_grad_buffer()  # type: ignore[operator]
    return taken


def sum_over_context(values: Tensor) -> Tensor:
    """Sum values over the context-parallel group, in place."""
    group = parallel_state.get_context_parallel_group()
    if dist.get_world_size(group) > 1:
        dist.all_reduce(values, group=group)
    return values
