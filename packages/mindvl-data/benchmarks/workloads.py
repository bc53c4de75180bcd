# SPDX-License-Identifier: Apache-2.0
"""Random streams of (tokens, visual tokens): the mixtures of the packing benchmark.

Used by packing.py. A mixture is a list of kinds; each sample draws its kind, then its length, then its visual share.
"""

from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Lengths = NDArray[np.int64]
Draw = Callable[[np.random.Generator, int], NDArray[np.float64]]
TooLong = Literal["cut", "drop"]
Kind = tuple[float, Draw, tuple[float, float]]  # (share of the samples, lengths, visual share from-to)


def uniform(low: int, high: int) -> Draw:
    return lambda generator, count: generator.integers(low, high + 1, count).astype(np.float64)


def log_uniform(low: int, high: int) -> Draw:
    return lambda generator, count: np.exp(generator.uniform(np.log(low), np.log(high), count))


def log_normal(median: float, sigma: float, low: int, high: int) -> Draw:
    return lambda generator, count: np.clip(np.exp(generator.normal(np.log(median), sigma, count)), low, high)


CAPTIONS = (uniform(100, 400), (0.45, 0.80))
PAGES = (log_uniform(1000, 4000), (0.55, 0.85))
CHARTS = (uniform(500, 1500), (0.50, 0.85))
TEXT = (log_normal(900, 0.9, 200, 8192), (0.0, 0.0))

MIXES: dict[str, tuple[Kind, ...]] = {
    "issue": ((0.40, *CAPTIONS), (0.15, *PAGES), (0.25, *CHARTS), (0.20, *TEXT)),
    "text only": ((1.0, *TEXT),),
    "documents": ((0.10, *CAPTIONS), (0.70, *PAGES), (0.10, *CHARTS), (0.10, *TEXT)),
    "captions only": ((1.0, *CAPTIONS),),
    "long tail": (
        (0.60, log_normal(300, 1.5, 16, 8192), (0.0, 0.0)),
        (0.40, log_normal(400, 1.2, 80, 8192), (0.3, 0.9)),
    ),
}  # fmt: skip


def draw(mix: str, count: int, capacity: int, seed: int, *, too_long: TooLong = "cut") -> tuple[Lengths, Lengths]:
    """(tokens, visual tokens) of `count` samples; samples longer than a pack are cut or dropped."""
    generator = np.random.default_rng(seed)
    kinds = MIXES[mix]
    kind = generator.choice(len(kinds), size=count, p=[share for share, _, _ in kinds])
    tokens, visual_share = np.zeros(count), np.zeros(count)
    for number, (_, lengths, (low, high)) in enumerate(kinds):
        here = kind == number
        tokens[here] = lengths(generator, int(here.sum()))
        visual_share[here] = generator.uniform(low, high, int(here.sum()))
    length = tokens.astype(np.int64)
    if too_long == "drop":
        length, visual_share = length[length <= capacity], visual_share[length <= capacity]
    length = np.minimum(length, capacity)
    return length, (length * visual_share).astype(np.int64)
