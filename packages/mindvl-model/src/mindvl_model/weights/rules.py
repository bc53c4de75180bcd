# SPDX-License-Identifier: Apache-2.0
"""The weight rule, and rules that several families share.

Pure functions of tensors; names.py and moe.py list the rules of each family.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mindvl_model.language_config import GroupedQueryConfig


@dataclass(frozen=True)
class WeightRule:
    """A parameter of the model and the stored tensors that make it.

    Both functions accept whole tensors and the blocks of one rank (sharding.py).
    """

    param_name: str
    hf_names: tuple[str, ...]
    join: Callable[[list[Tensor]], Tensor]  # stored tensors -> parameter
    split: Callable[[Tensor], list[Tensor]]  # parameter -> stored tensors
    sections: int = 1  # equal parts along axis 0 of each stored tensor, such as all queries, all keys, all values


def same(param_name: str, hf_name: str) -> WeightRule:
    """A parameter that equals one stored tensor."""
    return WeightRule(param_name, (hf_name,), lambda tensors: tensors[0], lambda tensor: [tensor])


def gated(param_name: str, gate: str, up: str) -> WeightRule:
    """The two halves of a gated MLP, concatenated along axis 0."""
    return WeightRule(param_name, (gate, up), torch.cat, lambda tensor: list(tensor.chunk(2)))


def grouped(config: GroupedQueryConfig, param_name: str, prefix: str, kind: str) -> WeightRule:
    """Grouped-query attention: megatron-core stores the queries of a group with its key and value."""
    size, queries = config.head_dim, config.num_heads // config.num_kv_heads

    def join(tensors: list[Tensor]) -> Tensor:
        width = tensors[0].shape[1:]
        parts = [
            tensor.reshape(-1, heads, size, *width) for heads, tensor in zip((queries, 1, 1), tensors, strict=True)
        ]
        return torch.cat(parts, dim=1).reshape(-1, *width)

    def split(tensor: Tensor) -> list[Tensor]:
        width = tensor.shape[1:]
        parts = tensor.reshape(-1, queries + 2, size, *width).split((queries, 1, 1), dim=1)
        return [part.reshape(-1, *width).contiguous() for part in parts]

    return WeightRule(f"{param_name}.{kind}", tuple(f"{prefix}{name}_proj.{kind}" for name in "qkv"), join, split)
