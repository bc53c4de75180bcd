# SPDX-License-Identifier: Apache-2.0
"""How parameters are sharded over tensor- and expert-parallel ranks, and which blocks of stored tensors a rank needs.

rules.py names the tensors; directory.py reads only these blocks. The sharding is that of megatron-core, by layer name:
a function that joins whole tensors into a parameter also joins their blocks into the shard of one rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from mindvl_model.errors import WeightError
from mindvl_model.weights.rules import WeightRule

SplitKind = Literal["whole", "rows", "columns", "experts"]

_ROWS = (  # split along the output dimension: also the vocabulary, query groups and both halves of a gated MLP
    "word_embeddings",
    "output_layer",
    "linear_qkv",
    "linear_q_proj",
    "linear_q_up_proj",
    "linear_kv_up_proj",
    "linear_fc1",
    "fc1",
)
_COLUMNS = ("linear_proj", "linear_fc2", "fc2")  # split along the input dimension, so every rank has the whole bias


@dataclass(frozen=True, kw_only=True)
class Share:
    """Tensor- and expert-parallel coordinates of a rank; the default is a single rank with the whole model."""

    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1


@dataclass(frozen=True)
class Block:
    """Block `index` of `count` equal blocks of a tensor along an axis, in each of `sections` equal parts of the axis."""

    axis: int
    index: int
    count: int
    sections: int = 1

    def ranges(self, size: int) -> list[tuple[int, int]]:
        """Start and end of each range of the block along the axis, whose length is `size`.

        Raises:
            ValueError: The axis cannot be split evenly.
        """
        length, rest = divmod(size, self.count * self.sections)
        if rest:
            raise ValueError(f"axis {self.axis}: must be divisible by {self.sections} x {self.count}, got {size}.")
        starts = [(section * self.count + self.index) * length for section in range(self.sections)]
        return [(start, start + length) for start in starts]


@dataclass(frozen=True)
class Rows:
    """Rows of a tensor from `first` up to but not including `end`, as far as they exist."""

    first: int
    end: int
    axis: int = 0

    def ranges(self, size: int) -> list[tuple[int, int]]:
        """Start and end of the range; equal if the tensor ends before `first`."""
        return [(min(self.first, size), min(self.end, size))]


WHOLE = Share()


def split_kind(param_name: str) -> SplitKind:
    """How a parameter is split over ranks."""
    layer, tensor = param_name.rsplit(".", 2)[-2:]
    if ".experts." in param_name:
        return "experts"
    if layer in _ROWS:
        return "rows"
    return "columns" if layer in _COLUMNS and tensor == "weight" else "whole"


def own_block(param_name: str, share: Share, *, gated: bool = True) -> Block | None:
    """The block of a whole parameter that a rank holds; both halves of a gated MLP are split.

    None for whole parameters and for experts.
    """
    kind = split_kind(param_name)
    if share.tp_size == 1 or kind not in ("rows", "columns"):
        return None
    sections = 2 if gated and ".linear_fc1." in param_name else 1
    return (
        Block(0, share.tp_rank, share.tp_size, sections) if kind == "rows" else Block(1, share.tp_rank, share.tp_size)
    )


def blocks(rule: WeightRule, share: Share) -> list[tuple[str, Block | None]]:
    """The stored tensors of a rank's shard of a parameter, with the block to read; None reads the whole tensor.

    Raises:
        WeightError: The experts cannot be split evenly over the expert-parallel ranks.
    """
    kind = split_kind(rule.param_name)
    if kind == "experts" and len(rule.hf_names) == 1:  # all experts in one tensor
        return [(rule.hf_names[0], Block(0, share.ep_rank, share.ep_size) if share.ep_size > 1 else None)]
    if kind == "experts":
        per_rank, rest = divmod(len(rule.hf_names), share.ep_size)
        if rest or not per_rank:
            raise WeightError(
                f"{rule.param_name}: {len(rule.hf_names)} tensors cannot be split over ep_size={share.ep_size} ranks. "
                "Use another ep_size."
            )
        names = rule.hf_names[share.ep_rank * per_rank : (share.ep_rank + 1) * per_rank]
        return [(name, None) for name in names]
    if kind == "whole" or share.tp_size == 1:
        return [(name, None) for name in rule.hf_names]
    axis, sections = (0, rule.sections) if kind == "rows" else (1, 1)
    return [(name, Block(axis, share.tp_rank, share.tp_size, sections)) for name in rule.hf_names]


def split(rule: WeightRule, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Split a whole parameter into the stored tensors, one expert at a time to save memory."""
    if split_kind(rule.param_name) != "experts" or len(rule.hf_names) == 1:
        yield from zip(rule.hf_names, rule.split(parameter), strict=True)
        return
    per_expert = len(rule.hf_names) // len(parameter)
    for expert in range(len(parameter)):
        names = rule.hf_names[expert * per_expert : (expert + 1) * per_expert]
        yield from zip(names, rule.split(parameter[expert : expert + 1]), strict=True)
