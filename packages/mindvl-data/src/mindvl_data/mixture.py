# SPDX-License-Identifier: Apache-2.0
"""Which source comes next: the one that is furthest behind its share.

Used by the planner. No random draw: over any prefix each source is within about one sample (or one sample's tokens)
of its share, where independent draws wander off with the square root of the length.
"""

from collections.abc import Sequence

import numpy as np

from mindvl_data.errors import DataError


def effective_weights(weights: Sequence[float], is_text: Sequence[bool], text_share: float | None) -> list[float]:
    """Weights that sum to 1, with text-only sources scaled to `text_share` together.

    Raises:
        DataError: A share is asked for that no source can give.
    """
    total_text = sum(w for w, text in zip(weights, is_text, strict=True) if text)
    total_other = sum(weights) - total_text
    if text_share is None:
        return [w / (total_text + total_other) for w in weights]
    if (text_share > 0 and not any(is_text)) or (text_share < 1 and all(is_text)):
        lacking = "no source is text-only" if text_share > 0 and not any(is_text) else "all sources are text-only"
        raise DataError(f"text_share={text_share} cannot be reached: {lacking}. data.text_share. Leave it out.")
    return [
        w / total_text * text_share if text else w / total_other * (1 - text_share)
        for w, text in zip(weights, is_text, strict=True)
    ]


class Mixture:
    """Largest deficit first. Its state is one number per source."""

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights = np.array(weights, np.float64)
        self._share = self._weights / self._weights.sum()
        self.owed = np.zeros(len(weights), np.float64)  # units each source is behind; the sum is 0
        self._active = self._weights > 0

    def next_source(self) -> int | None:
        """The source to draw from; None when all are exhausted."""
        if not self._active.any():
            return None
        return int(np.argmax(np.where(self._active, self.owed + self._share, -np.inf)))

    def took(self, source: int, amount: float = 1.0) -> None:
        """Record that `source` gave `amount` (samples or tokens)."""
        self.owed += self._share * amount
        self.owed[source] -= amount

    def exhaust(self, source: int) -> None:
        """Stop drawing from `source`; the others keep their proportions."""
        self._active[source] = False
        self.owed[source] = 0.0
        remaining = np.where(self._active, self._weights, 0.0)
        self._share = remaining / remaining.sum() if remaining.any() else remaining
