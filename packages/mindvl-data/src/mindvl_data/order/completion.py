# SPDX-License-Identifier: Apache-2.0
"""Complete a pack within two budgets: the subset of samples that fills the remaining tokens within the remaining patches.

Used by the packer where a search by tokens alone exceeds the patches of a pack or leaves too many of them unused. The
candidates are split into two halves. Sums of up to two samples of one half are combined with those of the other, in the
order of the scarcer budget (Horowitz and Sahni 1974). The arithmetic uses integers only.
"""

import numpy as np
from numpy.typing import NDArray

_PAIRED = 16  # samples of each half that are also used in pairs
_NEAREST = 4  # sums of the other half that are tried with each sum
_PAIRS = [np.triu_indices(count, 1) for count in range(_PAIRED + 1)]
_BELOW = np.arange(_NEAREST)

Sizes = NDArray[np.int64]


def best_subset(lengths: Sizes, patches: Sizes, *, tokens: int, limit: int, spare: int) -> list[int]:
    """Indices of up to four samples that fill the rest of a pack best; empty if none fits.

    Args:
        lengths: [samples] tokens; every second sample belongs to the same half, and a half gives up to two samples.
        patches: [samples] patches.
        tokens: Free tokens.
        limit: Patches that the samples may have together.
        spare: Patches that may remain free; the share of the patches that remains free beyond it counts like the same share
            of the tokens.
    """
    sizes, budgets = np.stack([lengths, patches]), np.array([[tokens], [limit]])
    first, first_numbers = _sums(sizes[:, 0::2], budgets)
    other, other_numbers = _sums(sizes[:, 1::2], budgets)
    # The nearest sums below the scarcer budget are most often within the other one.
    scarce = int(int(patches.sum()) * tokens > limit * int(lengths.sum()))
    order = other[scarce].argsort(kind="stable")
    free = budgets - first
    nearest = other[scarce, order].searchsorted(free[scarce], side="right") - 1
    tried = order[np.maximum(nearest[:, None] - _BELOW, 0)]  # [sums, nearest]
    left = free[:, :, None] - other[:, tried]  # [2, sums, nearest]
    loss = left[0] * max(1, limit) + np.maximum(left[1] - spare, 0) * tokens
    loss[(left < 0).any(axis=0)] = np.iinfo(np.int64).max
    row, column = divmod(int(loss.argmin()), _NEAREST)
    if (left[:, row, column] < 0).any():
        return []
    members = [2 * number for number in _members(int(first_numbers[row]), (len(lengths) + 1) // 2)]
    return members + [2 * number + 1 for number in _members(int(other_numbers[tried[row, column]]), len(lengths) // 2)]


def _sums(values: Sizes, budgets: Sizes) -> tuple[Sizes, NDArray[np.intp]]:
    """The sums [2, sums] of no, one and two samples that are within the budgets [2, 1], and their numbers [sums]."""
    one, two = _PAIRS[min(values.shape[1], _PAIRED)]
    sums = np.concatenate([np.zeros((2, 1), np.int64), values, values[:, one] + values[:, two]], axis=1)
    numbers = np.flatnonzero((sums <= budgets).all(axis=0))
    return sums[:, numbers], numbers


def _members(number: int, count: int) -> list[int]:
    """The indices of the samples in sum `number` of `_sums` over `count` samples."""
    if number <= count:
        return [number - 1] if number else []
    one, two = _PAIRS[min(count, _PAIRED)]
    return [int(one[number - count - 1]), int(two[number - count - 1])]
