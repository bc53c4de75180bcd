# SPDX-License-Identifier: Apache-2.0
"""How a parameter is cut over tensor- and expert-parallel ranks, and which blocks of stored tensors one rank needs.

Comes after rules.py names the tensors; directory.py reads no more than these blocks. Cuts are megatron-core's, by the name
of the layer: what joins whole tensors into a parameter joins blocks of them into the piece of one rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from mindvl_model.errors import WeightError
from mindvl_model.weights.rules import WeightRule

Cut = Literal["whole", "rows", "columns", "experts"]

_ROWS = (  # outputs are split; vocabulary, query groups and both halves of a gated MLP too
    "word_embeddings",
    "output_layer",
    "linear_qkv",
    "linear_q_up_proj",
    "linear_kv_up_proj",
    "linear_fc1",
    "fc1",
)
_COLUMNS = ("linear_proj", "linear_fc2", "fc2")  # inputs are split, so the bias is whole


@dataclass(frozen=True, kw_only=True)
class Share:
    """Which part of a model a rank holds; the default holds everything."""

    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1


@dataclass(frozen=True)
class Block:
    """One of `count` equal blocks of a tensor along an axis, taken in each of `sections` equal parts of that axis."""

    axis: int
    index: int
    count: int
    sections: int = 1

    def ranges(self, size: int) -> list[tuple[int, int]]:
        """First and end of what is taken along the axis, whose length is `size`.

        Raises:
            ValueError: The axis cannot be cut evenly.
        """
        length, rest = divmod(size, self.count * self.sections)
        if rest:
            raise ValueError(f"{size} cannot be cut into {self.sections} x {self.count} equal blocks")
        starts = [(section * self.count + self.index) * length for section in range(self.sections)]
        return [(start, start + length) for start in starts]


@dataclass(frozen=True)
class Rows:
    """Rows of a tensor from `first` to before `end`, as far as it has them."""

    first: int
    end: int
    axis: int = 0

    def ranges(self, size: int) -> list[tuple[int, int]]:
        """First and end of what is taken; equal where the tensor ends before."""
        return [(min(self.first, size), min(self.end, size))]


WHOLE = Share()


def cut_of(param_name: str) -> Cut:
    """How ranks share a parameter."""
    layer, kind = param_name.rsplit(".", 2)[-2:]
    if ".experts." in param_name:
        return "experts"
    if layer in _ROWS:
        return "rows"
    return "columns" if layer in _COLUMNS and kind == "weight" else "whole"


def own_block(param_name: str, share: Share) -> Block | None:
    """Which block of a whole parameter a rank holds; each half of a gated MLP is cut. None: all of it, or experts."""
    cut = cut_of(param_name)
    if share.tp_size == 1 or cut not in ("rows", "columns"):
        return None
    sections = 2 if ".linear_fc1." in param_name else 1
    return Block(0, share.tp_rank, share.tp_size, sections) if cut == "rows" else Block(1, share.tp_rank, share.tp_size)


def blocks(rule: WeightRule, share: Share) -> list[tuple[str, Block | None]]:
    """The stored tensors that make this rank's piece of a parameter; None takes the whole tensor.

    Raises:
        WeightError: The experts cannot be spread evenly over expert-parallel ranks.
    """
    cut = cut_of(rule.param_name)
    if cut == "experts":
        per_rank, rest = divmod(len(rule.hf_names), share.ep_size)
        if rest or not per_rank:
            raise WeightError(
                f"{rule.param_name}: {len(rule.hf_names)} tensors for ep_size={share.ep_size}. Change it."
            )
        names = rule.hf_names[share.ep_rank * per_rank : (share.ep_rank + 1) * per_rank]
        return [(name, None) for name in names]
    if cut == "whole" or share.tp_size == 1:
        return [(name, None) for name in rule.hf_names]
    axis, sections = (0, rule.sections) if cut == "rows" else (1, 1)
    return [(name, Block(axis, share.tp_rank, share.tp_size, sections)) for name in rule.hf_names]


def split(rule: WeightRule, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The stored tensors that a whole parameter becomes, one expert after the other to save memory."""
    if cut_of(rule.param_name) != "experts":
        yield from zip(rule.hf_names, rule.split(parameter), strict=True)
        return
    per_expert = len(rule.hf_names) // len(parameter)
    for expert in range(len(parameter)):
        names = rule.hf_names[expert * per_expert : (expert + 1) * per_expert]
        yield from zip(names, rule.split(parameter[expert : expert + 1]), strict=True)
