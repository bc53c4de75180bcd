# SPDX-License-Identifier: Apache-2.0
"""Trim differences, elect signs, and average what agrees. Source: Yadav et al., "TIES-Merging", 2023."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from .values import Values, differences

_HALF = 2**16


def thresholds(read: Callable[[], Iterable[Sequence[Values]]], num_values: int, density: float) -> list[float]:
    """For each model the magnitude of the k-th largest difference from the base, k = density * num_values.

    The magnitudes are sorted by radix in two passes over the tensor, so that memory does not grow with its size. Positive
    float32 numbers have the order of their bits.

    Args:
        read: Starts a pass and yields blocks of all models and the base.
    """
    rank = max(1, int(density * num_values))
    counts: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
    for blocks in read():
        bits = _magnitude_bits(blocks)
        counts = counts or [np.zeros(_HALF, np.int64) for _ in bits]
        for count, one in zip(counts, bits, strict=True):
            count += np.bincount(one >> 16, minlength=_HALF)
    tops, above = zip(*(_bin_of_rank(count, rank) for count in counts), strict=True)
    counts = [np.zeros(_HALF, np.int64) for _ in tops]
    for blocks in read():
        for count, one, top in zip(counts, _magnitude_bits(blocks), tops, strict=True):
            count += np.bincount(one[one >> 16 == top] & (_HALF - 1), minlength=_HALF)
    lows = [_bin_of_rank(count, rank - before)[0] for count, before in zip(counts, above, strict=True)]
    bits = [np.array([top << 16 | low], np.uint32) for top, low in zip(tops, lows, strict=True)]
    return [float(one.view(np.float32)[0]) for one in bits]


def ties(blocks: Sequence[Values], weights: Sequence[float], found: Sequence[float], *, scale: float) -> Values:
    """Merge trimmed differences; the last block `[n]` is the base.

    Differences below the threshold of their model are dropped; equal magnitudes are all kept. The sign of a value is that
    of the weighted sum; the weighted mean is taken over the differences that have this sign.
    """
    deltas, base = differences(blocks)
    kept = [
        np.where(np.abs(delta).astype(np.float32) >= threshold, delta, 0)
        for delta, threshold in zip(deltas, found, strict=True)
    ]
    return base + agreeing_mean(kept, weights) * base.dtype.type(scale)


def agreeing_mean(deltas: Sequence[Values], weights: Sequence[float], *, divide: bool = True) -> Values:
    """Weighted mean, or sum, of the differences that have the sign of the weighted sum."""
    kind = deltas[0].dtype.type
    positive = sum(delta * kind(weight) for delta, weight in zip(deltas, weights, strict=True)) >= 0
    total, mass = np.zeros_like(deltas[0]), np.zeros_like(deltas[0])
    for delta, weight in zip(deltas, weights, strict=True):
        agrees = np.where(positive, delta > 0, delta < 0)
        total += np.where(agrees, delta * kind(weight), 0)
        mass += agrees * kind(weight)
    if not divide:
        return total
    return np.divide(total, mass, out=np.zeros_like(total), where=np.abs(mass) > 1e-8)


def _magnitude_bits(blocks: Sequence[Values]) -> list[np.ndarray[tuple[int], np.dtype[np.uint32]]]:
    return [np.abs(delta).astype(np.float32).view(np.uint32) for delta in differences(blocks)[0]]


def _bin_of_rank(count: np.ndarray[tuple[int], np.dtype[np.int64]], rank: int) -> tuple[int, int]:
    """The bin that holds the value of a rank from the top, and how many values lie in higher bins."""
    from_top = np.cumsum(count[::-1])
    place = int(np.searchsorted(from_top, rank))
    return len(count) - 1 - place, int(from_top[place - 1]) if place else 0
