# SPDX-License-Identifier: Apache-2.0
"""Gradient norms of the model parts.

Computed after an update, while the optimizer still has its gradients.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from megatron.core.utils import unwrap_model
from torch import Tensor

from mindvl_model.parameters import PARTS, parameter_group


@torch.no_grad()
def squared_norms(optimizer: Any, models: Sequence[torch.nn.Module]) -> Tensor:
    """Sums of squares [vision, projector, language] float32 of this rank's share of the gradients.

    Sums over all ranks count every gradient once: duplicates on tensor-parallel ranks and of tied embeddings are excluded,
    as in megatron-core's norm. After clipping, these are the norms of clipped gradients.
    """
    part_of = {
        id(parameter): PARTS.index(parameter_group(name))
        for model in models
        for name, parameter in unwrap_model(model).named_parameters()
    }
    device = next(parameter for model in models for parameter in model.parameters()).device  # a chunk may be empty
    sums = torch.zeros(len(PARTS), device=device)
    for part in optimizer.chained_optimizers:
        group = getattr(part, "tp_group", None)
        for whole, share in _shares(part):
            if share is None or share.grad is None:
                continue
            if param_is_not_shared(share) and param_is_not_tensor_parallel_duplicate(share, group):
                sums[part_of[id(whole)]] += torch.linalg.vector_norm(share.grad.to(device), dtype=torch.float32) ** 2
    return sums


def _shares(optimizer: Any) -> list[tuple[Any, Any]]:
    """Parameters with the slices that the distributed optimizer of this rank updates; none if it has no parameters."""
    if optimizer.is_stub_optimizer:  # no parameter of this rank is trained
        return []
    pairs = (
        (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
        (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
    )
    return [
        couple
        for wholes, shares in pairs
        for whole_group, share_group in zip(wholes, shares, strict=True)
        for couple in zip(whole_group, share_group, strict=True)
    ]
