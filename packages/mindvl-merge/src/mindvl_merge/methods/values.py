# SPDX-License-Identifier: Apache-2.0
"""Blocks of values that merge methods compute with."""

from collections.abc import Sequence
from typing import Any

import numpy as np

Values = np.ndarray[Any, np.dtype[Any]]

_WIDE = (np.dtype(np.float32), np.dtype(np.float64))


def accumulator(blocks: Sequence[Values]) -> np.dtype[Any]:
    """Data type of sums: float32 for values of 16 or fewer bits, float64 for wider ones."""
    return np.dtype(np.float64 if any(block.dtype in _WIDE for block in blocks) else np.float32)


def differences(blocks: Sequence[Values]) -> tuple[list[Values], Values]:
    """The difference of each block but the last from the last one, the base; and the base itself."""
    dtype = accumulator(blocks)
    base = blocks[-1].astype(dtype)
    return [block.astype(dtype) - base for block in blocks[:-1]], base
