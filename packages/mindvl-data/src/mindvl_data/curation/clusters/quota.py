# SPDX-License-Identifier: Apache-2.0
"""Divide a number of samples among clusters: by weight, with a floor and a limit for each, exactly.

Comes before sample.py. Source: appendix B.1.1 of the MindVL paper (clusters of larger variance are sampled more).
"""

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]


def quotas(total: int, weights: NDArray[np.float64], sizes: Counts, floor: int) -> Counts:
    """How many samples to take from each cluster; the sum is min(total, all samples).

    Every cluster gives min(its size, floor). The rest is divided in proportion to `weights`; what a cluster does not have
    is divided among the others in the same way. Fractions are rounded by largest remainders, ties to earlier clusters.
    If the floors alone exceed the total, it is divided in proportion to the floors.
    """
    assert np.all(weights >= 0), weights
    total = min(total, int(sizes.sum()))
    floors = np.minimum(sizes, floor)
    if floors.sum() >= total:
        return _divided(total, floors.astype(np.float64), floors)
    return floors + _divided(total - int(floors.sum()), weights, sizes - floors)


def _divided(total: int, weights: NDArray[np.float64], limits: Counts) -> Counts:
    """Divide `total` in proportion to the weights, at most `limits`; clusters of weight 0 come last, by their limits."""
    shares = np.zeros(len(limits))
    is_open = limits > 0
    rest = float(total)
    while rest > 0 and is_open.any():
        current = np.where(is_open, weights, 0.0)
        if current.sum() <= 0:
            current = np.where(is_open, limits.astype(np.float64), 0.0)
        wanted = rest * current / current.sum()
        full = is_open & (wanted >= limits)
        if not full.any():
            shares = np.where(is_open, wanted, shares)
            break
        shares[full] = limits[full]
        is_open &= ~full
        rest = total - float(shares[~is_open].sum())
    whole = np.floor(shares + 1e-9).astype(np.int64)
    missing = total - int(whole.sum())
    fractions = np.where(whole < limits, shares - whole, -1.0)
    whole[np.argsort(-fractions, kind="stable")[:missing]] += 1
    return whole
