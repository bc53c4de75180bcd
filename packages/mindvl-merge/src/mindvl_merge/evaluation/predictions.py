# SPDX-License-Identifier: Apache-2.0
"""A question to a model, with the size limits of its images, and the answer, with the unit of its coordinates.

Comes after benchmark.py; predict.py and remote.py answer questions, run.py scores the answers.
"""

from dataclasses import dataclass, field
from typing import Literal

from mindvl_merge.evaluation.benchmark import Item
from mindvl_merge.evaluation.grounding import Size

# absolute: pixels of the resized image; relative: thousandths of its width and height.
CoordinateUnit = Literal["absolute", "relative"]


@dataclass(frozen=True, kw_only=True)
class Question:
    """An item with the size limits of its images."""

    item: Item
    min_pixels: int
    max_pixels: int


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """An answer, and the image sizes that its coordinates refer to."""

    item: Item
    answer: str
    original: tuple[Size, ...]  # of each image
    resized: tuple[Size, ...]  # as the model saw it
    coordinates: CoordinateUnit = "absolute"  # in the answer
    # of generation: the time of the batch divided by its items, or of the request to an endpoint; None if not measured
    seconds: float | None = field(default=None, compare=False)

    @property
    def units(self) -> tuple[Size, ...]:
        """Size of each image in the unit of coordinates."""
        return self.resized if self.coordinates == "absolute" else ((1000, 1000),) * len(self.resized)
