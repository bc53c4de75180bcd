# SPDX-License-Identifier: Apache-2.0
"""Parameters by part and name: which part a parameter belongs to, freezing and initialization.

Used after the model is built, before weights are loaded or an optimizer is created.
"""

import hashlib
import math
from collections.abc import Collection, Iterable
from typing import Literal

import torch
from torch import Tensor

from mindvl_model.config import MindVLConfig
from mindvl_model.weights.sharding import WHOLE, Share, own_block

Part = Literal["vision", "projector", "language"]
PARTS: tuple[Part, ...] = ("vision", "projector", "language")


def parameter_group(param_name: str) -> Part:
    """The part of a parameter, from the first component of its name."""
    part = param_name.split(".", 1)[0]
    assert part in PARTS, param_name
    return part


def named_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """The tensors of a model that directories and checkpoints store: parameters and the biases of routers."""
    return {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}


def set_trainable(model: torch.nn.Module, parts: Iterable[Part]) -> None:
    """Freeze every parameter outside these parts (paper, Table 1: the warm-up phase trains only the projector)."""
    trainable = set(parts)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter_group(name) in trainable)


@torch.no_grad()
def initialize(
    model: torch.nn.Module, config: MindVLConfig, seed: int, *, loaded: Collection[str] = frozenset()
) -> None:
    """Initialize all parameters with generators seeded by global name, independent of build order and layout.

    Norms are set to one, biases to zero. Matrices are drawn from a normal distribution with standard deviation init_std,
    divided by sqrt(2 * num_layers) for projections into the residual stream, as in Megatron-LM; if init_std is None,
    with standard deviation 1 / sqrt(fan_in).

    Args:
        loaded: Global names of parameters that already have their values; drawing 8.7B values takes a minute.
    """
    from mindvl_model.megatron.share import global_name, share_of  # imports megatron-core

    for name, parameter in model.named_parameters():
        param_name = global_name(model, name)
        if param_name not in loaded:
            initialize_parameter(param_name, parameter, config, seed, share_of(model, param_name))


@torch.no_grad()
def initialize_parameter(name: str, parameter: Tensor, config: MindVLConfig, seed: int, share: Share = WHOLE) -> None:
    """Initialize a parameter, a rank's share of it or a routing bias, like `initialize`; `name` is the global name."""
    if name.endswith("bias"):
        parameter.zero_()
    elif "norm" in name.rsplit(".", 2)[-2]:
        parameter.fill_(1.0)
    else:
        gated = parameter_group(name) == "language" or config.vision.entry.gated
        block = own_block(name, share, gated=gated)
        if block is None:
            parameter.copy_(_normal(name, parameter, _std(name, parameter.shape, config), seed))
            return
        shape = [size * block.count if axis == block.axis else size for axis, size in enumerate(parameter.shape)]
        whole = torch.empty(shape, device="meta")
        drawn = _normal(name, whole, _std(name, whole.shape, config), seed)
        pieces = [drawn.narrow(block.axis, start, end - start) for start, end in block.ranges(shape[block.axis])]
        parameter.copy_(torch.cat(pieces, dim=block.axis))


def _std(name: str, shape: torch.Size, config: MindVLConfig) -> float:
    part = config.language if parameter_group(name) == "language" else config.vision
    if part.init_std is None:
        return 1 / math.sqrt(shape[-2] if len(shape) == 3 else shape[-1])  # experts are [experts, in, out]
    writes_residual = "linear_proj" in name or "linear_fc2" in name
    return part.init_std / math.sqrt(2 * part.num_layers) if writes_residual else part.init_std


def _normal(name: str, like: Tensor, std: float, seed: int) -> Tensor:
    if like.ndim == 3:  # each expert has its own seed, so that its values do not depend on the rank
        first = getattr(like, "first_expert", 0)
        pieces = [_normal(f"{name}.{first + index}", expert, std, seed) for index, expert in enumerate(like)]
        return torch.stack(pieces)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(like.shape, dtype=torch.float32).normal_(0.0, std, generator=generator)
