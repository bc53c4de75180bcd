# SPDX-License-Identifier: Apache-2.0
"""Select the next source: of the sources behind their share, the one that would first be a whole sample behind.

Used by the data order, without randomness: over any prefix each source deviates by less than one sample from its share
(R. Tijdeman, "The chairman assignment problem", 1980). The deviation of independent draws grows with the square root of
the length, and that of the largest-deficit rule can exceed one sample. If weights count tokens, a sample of average
length counts as one.

The order is the same for every version of Python and numpy: floats are added by `math.fsum` or element by element, never
by `sum`, which is compensated from Python 3.12 on, nor by a numpy reduction, whose order of additions may change.
"""

import math
from collections.abc import Sequence

import numpy as np

from mindvl_data.errors import DataError


def effective_weights(weights: Sequence[float], is_text: Sequence[bool], text_share: float | None) -> list[float]:
    """Weights that sum to 1, with text-only sources scaled to `text_share` together.

    Raises:
        DataError: No source can provide the requested share.
    """
    if text_share is None:
        total = math.fsum(weights)
        return [w / total for w in weights]
    total_text = math.fsum(w for w, text in zip(weights, is_text, strict=True) if text)
    total_other = math.fsum(w for w, text in zip(weights, is_text, strict=True) if not text)
    if (text_share > 0 and not any(is_text)) or (text_share < 1 and all(is_text)):
        lacking = "no source is text-only" if text_share > 0 and not any(is_text) else "all sources are text-only"
        raise DataError(f"data.text_share: {text_share} cannot be reached because {lacking}. Omit it.")
    return [
        w / total_text * text_share if text else w / total_other * (1 - text_share)
        for w, text in zip(weights, is_text, strict=True)
    ]


class Mixture:
    """Selects sources according to weights. Its state is one number per source.

    Args:
        weights: Relative shares; a source of weight 0 is never selected.
        unit: Amount of an average sample: 1 if weights count samples, its length if they count tokens.
    """

    def __init__(self, weights: Sequence[float], *, unit: float = 1.0) -> None:
        self._weights = np.array(weights, np.float64)
        self._unit = unit
        self._active = self._weights > 0
        self.owed = np.zeros(len(weights), np.float64)  # deficit of each source; the sum is 0
        # Written to by every draw: an allocation costs as much as the arithmetic.
        self._behind, self._deadlines, self._taken = np.empty((3, len(weights)))
        self._is_early = np.empty(len(weights), np.bool_)
        self._set_shares()

    def next_source(self) -> int | None:
        """The source to draw from; None when all are exhausted."""
        if not self._num_active:
            return None
        behind, deadlines, is_early = self._behind, self._deadlines, self._is_early
        owed = self.owed if self._unit == 1 else np.divide(self.owed, self._unit, behind)
        np.add(owed, self._share, behind)  # 0 for exhausted sources, so below the margin
        np.less(behind, self._margin, is_early)
        np.subtract(1 - self._margin, behind, deadlines)
        np.divide(deadlines, self._divisor, deadlines)
        np.putmask(deadlines, is_early, np.inf)
        first = int(deadlines.argmin())
        if is_early[first]:  # amounts that differ from the unit can leave all of them just below the margin
            return int(np.where(self._active, behind, -np.inf).argmax())
        return first

    def took(self, source: int, amount: float = 1.0) -> None:
        """Record that `source` gave `amount` (samples or tokens)."""
        taken = self._share if amount == 1 else np.multiply(self._share, amount, self._taken)
        np.add(self.owed, taken, self.owed)
        self.owed[source] -= amount

    def exhaust(self, source: int) -> None:
        """Stop drawing from `source`; the others keep their proportions and share its deficit."""
        self._active[source] = False
        self._set_shares()
        lost, self.owed[source] = self.owed[source], 0.0
        self.owed += lost * self._share

    def _set_shares(self) -> None:
        remaining = np.where(self._active, self._weights, 0.0)
        self._share = remaining / math.fsum(remaining.tolist()) if remaining.any() else remaining
        self._divisor = np.where(self._share > 0, self._share, 1.0)
        self._num_active = int(self._active.sum())
        self._margin = 1 / max(1, 2 * self._num_active - 2)
