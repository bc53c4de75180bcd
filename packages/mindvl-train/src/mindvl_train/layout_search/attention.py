# SPDX-License-Identifier: Apache-2.0
"""Bytes that core attention stores for backward, by kernel.

Comes after blocks.py, before the layers of decoder.py and vision_encoder.py.
"""

from dataclasses import dataclass
from functools import lru_cache

from mindvl_ops.torch_backend.padded import group_by_length
from mindvl_train.layout_search.blocks import Setting

_NPU_SUMS = 2 * 8 * 4  # fp32 maximum and sum of each query and head, stored eight times


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Attention heads of one rank."""

    query: float
    key: float
    width: int  # size of query and key heads
    value: int  # size of value heads

    @property
    def numbers(self) -> float:
        """Elements of queries, keys and values of one token."""
        return self.query * self.width + self.key * (self.width + self.value)


@dataclass(frozen=True, kw_only=True)
class Core:
    """Bytes of one call of core attention."""

    kept: float  # queries, keys, softmax statistics and copies, without values and output
    holds_values: bool  # whether values are a view of the projection, which then stays in memory
    peak: float  # peak in backward, above the stored bytes


def attention_core(setting: Setting, lengths: tuple[int, ...], heads: Heads) -> Core:
    """Core attention with these sequence lengths; its output is also stored by the next matrix."""
    wide, tokens = setting.wide, sum(lengths)
    turned = wide * tokens * (heads.query + heads.key) * heads.width
    output = wide * tokens * heads.query * heads.value
    gradients = wide * tokens * heads.numbers + output
    is_flash = setting.kernels == "cuda" and wide == 2
    padded_tokens, is_view = padded_size(lengths)
    if setting.kernels == "npu":
        sums, copies = tokens * heads.query * _NPU_SUMS, 0.0
    elif (is_flash or is_view) and heads.width == heads.value:
        sums, copies = 4 * tokens * heads.query, 0.0
    elif is_flash:  # values and output are padded with zeros to the size of keys, and so are both gradients
        sums, padded = 4 * tokens * heads.query, wide * tokens * (heads.query + heads.key) * heads.width
        peak = turned + 2 * padded
        if setting.selective:
            return Core(kept=turned, holds_values=True, peak=peak + sums + padded)
        return Core(kept=turned + sums + padded, holds_values=False, peak=peak)
    else:  # padded batches: equal head sizes, values padded with zeros
        sums, copies = (
            4 * padded_tokens * heads.query,
            2 * wide * padded_tokens * (heads.query + heads.key) * heads.width,
        )
    if setting.selective:
        return Core(kept=turned, holds_values=True, peak=gradients + sums + 1.5 * copies)
    if copies:
        return Core(kept=copies + sums, holds_values=False, peak=1.5 * copies)
    return Core(kept=turned + sums, holds_values=True, peak=gradients)


@lru_cache(maxsize=1024)
def padded_size(lengths: tuple[int, ...]) -> tuple[int, bool]:
    """Tokens of the padded batches of a pack, and whether the pack needs no copy."""
    groups = group_by_length(lengths)
    size = sum(len(group) * max(lengths[number] for number in group) for group in groups)
    return size, len(groups) == 1 and size == sum(lengths)
