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
    forward: float = 0.0  # additional bytes at the peak in forward


def attention_core(setting: Setting, lengths: tuple[int, ...], heads: Heads) -> Core:
    """Core attention with these sequence lengths; its output is also stored by the next matrix."""
    wide, tokens = setting.wide, sum(lengths)
    turned = wide * tokens * (heads.query + heads.key) * heads.width
    output = wide * tokens * heads.query * heads.value
    gradients = wide * tokens * heads.numbers + output
    is_flash = setting.kernels == "cuda" and wide == 2
    padded_tokens, is_view = padded_size(lengths)
    if setting.kernels == "cuda" and wide == 4 and heads.query != heads.key:
        return _grouped_core(setting, lengths, heads)
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


def _grouped_core(setting: Setting, lengths: tuple[int, ...], heads: Heads) -> Core:
    """Grouped queries in fp32 on a GPU, for which scaled_dot_product_attention has no fused kernel and keeps the logits.

    It also keeps copies of the scaled queries and keys and of the values, both repeated for every query head.
    """
    wide, padded_tokens = setting.wide, padded_size(lengths)[0]
    logits = [wide * heads.query * size for size in _squares(lengths)]  # of the padded batches, longest segments first
    copies = wide * padded_tokens * heads.query * (2 * heads.width + heads.value)
    gathered = wide * padded_tokens * heads.numbers
    # Two more arrays of logits in backward, when those of the batches after it are free.
    most = max(2 * own - sum(logits[number + 1 :]) for number, own in enumerate(logits))
    forward = 1.25 * max(logits)  # before the softmax, and a mask of one byte
    if setting.selective:
        turned = wide * sum(lengths) * (heads.query + heads.key) * heads.width
        return Core(
            kept=turned,
            holds_values=True,
            peak=gathered + copies + sum(logits) + max(most, forward),
            forward=sum(logits),
        )
    return Core(kept=copies + sum(logits), holds_values=False, peak=most + gathered, forward=forward)


@lru_cache(maxsize=1024)
def _squares(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Query-key pairs of each padded batch of a pack."""
    return tuple(len(group) * max(lengths[number] for number in group) ** 2 for group in group_by_length(lengths))


@lru_cache(maxsize=1024)
def padded_size(lengths: tuple[int, ...]) -> tuple[int, bool]:
    """Tokens of the padded batches of a pack, and whether the pack needs no copy."""
    groups = group_by_length(lengths)
    size = sum(len(group) * max(lengths[number] for number in group) for group in groups)
    return size, len(groups) == 1 and size == sum(lengths)
