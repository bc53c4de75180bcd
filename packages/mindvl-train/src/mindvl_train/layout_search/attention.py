# SPDX-License-Identifier: Apache-2.0
"""What the core of attention keeps for backward, by the kernel that computes it.

Comes after blocks.py, before the layers of decoder.py and vision_encoder.py.
"""

from dataclasses import dataclass
from functools import lru_cache

from mindvl_ops.torch_backend.padded import group_by_length
from mindvl_train.layout_search.blocks import Setting

_NPU_SUMS = 2 * 8 * 4  # maximum and sum of each query and head, each eight times, float32


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Heads that one call computes on one rank."""

    query: float
    key: float
    width: int  # of queries and keys
    value: int  # width of values

    @property
    def numbers(self) -> float:
        """In queries, keys and values of one token."""
        return self.query * self.width + self.key * (self.width + self.value)


@dataclass(frozen=True, kw_only=True)
class Core:
    """Bytes of one call."""

    kept: float  # queries and keys, sums, copies; not the values, and not the output unless it is a copy
    holds_values: bool  # values are a view of what the projection made, which stays with them
    peak: float  # in backward, above what is kept


def attention_core(setting: Setting, lengths: tuple[int, ...], heads: Heads) -> Core:
    """Attention inside segments of these lengths; its output is also kept by the matrix that follows."""
    wide, tokens = setting.wide, sum(lengths)
    turned = wide * tokens * (heads.query + heads.key) * heads.width
    output = wide * tokens * heads.query * heads.value
    gradients = wide * tokens * heads.numbers + output
    is_flash = setting.kernels == "cuda" and wide == 2 and heads.width == heads.value
    places, is_view = padded_places(lengths)
    if setting.kernels == "npu":
        sums, copies = tokens * heads.query * _NPU_SUMS, 0.0
    elif is_flash or (is_view and heads.width == heads.value):
        sums, copies = 4 * tokens * heads.query, 0.0
    else:  # padded batches: one width for all, values filled up with zeros
        sums, copies = 4 * places * heads.query, 2 * wide * places * (heads.query + heads.key) * heads.width
    if setting.selective:
        return Core(kept=turned, holds_values=True, peak=gradients + sums + 1.5 * copies)
    if copies:
        return Core(kept=copies + sums, holds_values=False, peak=1.5 * copies)
    return Core(kept=turned + sums, holds_values=True, peak=gradients)


@lru_cache(maxsize=1024)
def padded_places(lengths: tuple[int, ...]) -> tuple[int, bool]:
    """Places of the padded batches that a pack becomes, and whether the pack is such a batch as it is."""
    groups = group_by_length(lengths)
    places = sum(len(group) * max(lengths[number] for number in group) for group in groups)
    return places, len(groups) == 1 and places == sum(lengths)
