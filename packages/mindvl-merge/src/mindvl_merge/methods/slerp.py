# SPDX-License-Identifier: Apache-2.0
"""Spherical linear interpolation of two tensors. Source: Shoemake, "Animating rotation with quaternion curves", 1985."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from .average import average
from .values import Values

_NEARLY_PARALLEL = 0.9995  # cosine above which the arc is a line in float32


@dataclass(frozen=True, kw_only=True)
class Angle:
    """The angle between two flattened tensors."""

    cosine: float


def angle(blocks: Iterable[Sequence[Values]]) -> Angle:
    """Read two whole tensors, a pair of blocks at a time."""
    products = np.zeros(3)  # a * b, a * a, b * b
    for first, second in blocks:
        one, two = first.astype(np.float64), second.astype(np.float64)
        products += (np.dot(one, two), np.dot(one, one), np.dot(two, two))
    norms = math.sqrt(products[1]) * math.sqrt(products[2])
    return Angle(cosine=float(products[0] / norms) if norms > 0 else 1.0)


def slerp(blocks: Sequence[Values], weights: Sequence[float], found: Angle) -> Values:
    """Interpolate along the arc; `weights` are (1 - t, t). Nearly parallel tensors are averaged."""
    if abs(found.cosine) > _NEARLY_PARALLEL:
        return average(blocks, weights)
    whole = math.acos(found.cosine)
    return average(blocks, [math.sin(weight * whole) / math.sin(whole) for weight in weights])
