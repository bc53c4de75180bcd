# SPDX-License-Identifier: Apache-2.0
"""Add weighted differences from a base model. Source: Ilharco et al., "Editing models with task arithmetic", 2023."""

from collections.abc import Sequence

from .values import Values, differences


def task_arithmetic(blocks: Sequence[Values], weights: Sequence[float], *, scale: float) -> Values:
    """`base + scale * sum(weight * (model - base))`; the last block `[n]` is the base."""
    deltas, base = differences(blocks)
    total = deltas[0] * base.dtype.type(weights[0])
    for delta, weight in zip(deltas[1:], weights[1:], strict=True):
        total += delta * base.dtype.type(weight)
    return base + total * base.dtype.type(scale)
