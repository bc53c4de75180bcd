# SPDX-License-Identifier: Apache-2.0
"""Weighted average of weights. Source: Wortsman et al., "Model soups", 2022; the paper's section on model merging."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .values import Values, accumulator


def average(blocks: Sequence[Values], weights: Sequence[float], scratch: Sequence[Values] | None = None) -> Values:
    """Weighted sum of blocks `[n]`, in float32 for 16-bit values and in float64 for others; the caller rounds it once.

    Both are precise enough that merging copies of one model with equal weights gives a bitwise identical model.

    Args:
        scratch: Two arrays of at least n values to compute in, of the type that `accumulator` returns; new ones if None.
    """
    dtype, size = accumulator(blocks), len(blocks[0])
    total, other = (one[:size] for one in scratch) if scratch is not None else np.empty((2, size), dtype)
    is_equal = len(set(weights)) == 1  # then one multiplication at the end
    for number, (block, weight) in enumerate(zip(blocks, weights, strict=True)):
        into: np.ndarray[Any, Any] = other if number else total
        np.copyto(into, block, casting="unsafe")
        if not is_equal:
            np.multiply(into, dtype.type(weight), out=into)
        if number:
            np.add(total, other, out=total)
    if is_equal:
        np.multiply(total, dtype.type(weights[0]), out=total)
    return total
