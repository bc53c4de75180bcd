# SPDX-License-Identifier: Apache-2.0
"""What an evaluation works with: benchmarks, their questions and their images.

Comes first; readers/ make them from files.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

ScoreKind = Literal["exact", "point", "box"]
Box = tuple[float, float, float, float]

IMAGE_MARK = "<image>"


@dataclass(frozen=True, kw_only=True)
class EmbeddedImage:
    """An image whose bytes were inside a benchmark file; `name` is the place, for messages."""

    name: str
    content: bytes = field(repr=False)

    def read_bytes(self) -> bytes:
        """The image file."""
        return self.content

    def __str__(self) -> str:
        return self.name


ImageSource = Path | EmbeddedImage


@dataclass(frozen=True, kw_only=True)
class Item:
    """One question."""

    id: str
    task: str
    images: tuple[ImageSource, ...]
    question: str  # with one IMAGE_MARK for each image
    answer: str  # for display: the first reference
    score: ScoreKind = "exact"  # used without a metric
    box: Box | None = None  # left, top, right, bottom in pixels of the first image
    metric: str | None = None  # name for metrics.score
    references: Any = None  # for metrics.score; None: `answer`
    options: Mapping[str, Any] = field(default_factory=dict)  # for metrics.score
    fields: Mapping[str, Any] = field(default_factory=dict)  # for metrics.aggregate


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A named list of questions."""

    name: str
    items: tuple[Item, ...]
    kind: str | None = None  # benchmark or metric of all items; None: each item has its own score kind
    notes: tuple[str, ...] = ()  # how the file was recognized, and what was omitted
