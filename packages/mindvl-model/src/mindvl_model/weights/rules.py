# SPDX-License-Identifier: Apache-2.0
"""The weight rule, and rules that several parts share.

Pure functions of tensors; names.py and decoder.py list the rules of each part.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


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
