# SPDX-License-Identifier: Apache-2.0
"""Drop differences at random and rescale the rest. Source: Yu et al., "Language models are Super Mario", 2024."""

import hashlib
from collections.abc import Sequence

import numpy as np

from .ties import agreeing_mean
from .values import Values, differences


def dare(
    blocks: Sequence[Values],
    weights: Sequence[float],
    *,
    scale: float,
    density: float,
    seed: int,
    name: str,
    position: int,
    elect_signs: bool,
) -> Values:
    """Keep each difference with probability `density` and divide it by `density`; the last block `[n]` is the base.

    Args:
        name: Canonical name of the tensor. It seeds the random numbers together with `seed`, the model's index and
            `position`, so that they depend neither on files nor on threads.
        position: Index of the first value in the flattened tensor.
        elect_signs: Add only the differences that have the sign of the weighted sum (dare_ties).
    """
    deltas, base = differences(blocks)
    kind, kept = base.dtype.type, []
    for model, delta in enumerate(deltas):
        key = hashlib.sha256(f"{seed} {model} {position} {name}".encode()).digest()[:16]
        draws = np.random.Generator(np.random.Philox(key=np.frombuffer(key, np.uint64))).random(len(delta), np.float32)
        kept.append(np.where(draws < density, delta / kind(density), 0))
    if elect_signs:
        return base + agreeing_mean(kept, weights, divide=False) * kind(scale)
    total = kept[0] * kind(weights[0])
    for delta, weight in zip(kept[1:], weights[1:], strict=True):
        total += delta * kind(weight)
    return base + total * kind(scale)
