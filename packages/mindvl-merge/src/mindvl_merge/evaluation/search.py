# SPDX-License-Identifier: Apache-2.0
"""Score a model at every cell of a resolution grid on held-out items, each distinct resize once, and choose a cell.

Comes after merging, before the final test. Most cells resize most images alike (an image inside both limits keeps its
size), so requests with equal model input are merged. Source: the paper's test-time resolution search and
Figure 4.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Generic, Protocol, TypeVar

import numpy as np

from mindvl_merge.errors import MergeError
from mindvl_merge.evaluation.resolution import Cell, ResolutionGrid

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class Request(Generic[Item]):
    """One item with image size limits."""

    item: Item
    min_pixels: int
    max_pixels: int


class Scorer(Protocol[Item]):
    """The evaluation interface of a search; mindvl_merge.evaluation implements it."""

    def resized(self, item: Item, min_pixels: int, max_pixels: int) -> Hashable:
        """A key of the model input for `item`: equal for two limits if and only if the inputs are equal."""
        ...

    def score(self, requests: Sequence[Request[Item]]) -> Sequence[float]:
        """A score for each request, higher is better."""
        ...


@dataclass(frozen=True, kw_only=True)
class CellScore:
    """Scores of one cell."""

    min_pixels: int
    max_pixels: int
    score: float  # unweighted mean over tasks
    by_task: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class ResolutionSearch:
    """Result of a search."""

    cells: tuple[CellScore, ...]
    chosen: CellScore
    num_requests: int  # cells times items
    num_evaluations: int  # distinct requests that were run

    @property
    def num_saved(self) -> int:
        """Evaluations saved by merging equal requests."""
        return self.num_requests - self.num_evaluations


@dataclass(frozen=True, kw_only=True)
class Box:
    """Five numbers of a box plot."""

    minimum: float
    lower_quartile: float
    median: float
    upper_quartile: float
    maximum: float


def search_resolution(
    scorer: Scorer[Item], items: Sequence[Item], grid: ResolutionGrid, *, tasks: Sequence[str] | None = None
) -> ResolutionSearch:
    """Score every cell of `grid` on `items` and choose one.

    Args:
        items: Held-out items; the final test must use others.
        tasks: Task of each item. A cell's score is the unweighted mean of its task means; without tasks, of all items.

    Raises:
        MergeError: There is no item, or `tasks` or the scores have another length.
    """
    if not items:
        raise MergeError("items: there is no item to score. Give a validation set.")
    tasks = ["all"] * len(items) if tasks is None else tasks
    if len(tasks) != len(items):
        raise MergeError(f"tasks: got {len(tasks)} tasks for {len(items)} items. Give one task per item.")
    cells = grid.cells()
    positions: dict[tuple[int, Hashable], int] = {}
    requests: list[Request[Item]] = []
    position_of = np.empty((len(cells), len(items)), dtype=np.int64)
    for column, item in enumerate(items):
        for row, cell in enumerate(cells):
            key = (column, scorer.resized(item, cell.min_pixels, cell.max_pixels))
            if key not in positions:
                positions[key] = len(requests)
                requests.append(Request(item=item, min_pixels=cell.min_pixels, max_pixels=cell.max_pixels))
            position_of[row, column] = positions[key]
    scores = list(scorer.score(requests))
    if len(scores) != len(requests):
        raise MergeError(
            f"Scorer.score: got {len(scores)} scores for {len(requests)} requests. Return one score per request."
        )
    table = np.asarray(scores, dtype=np.float64)[position_of]  # [cells, items]
    cell_scores = tuple(_cell_score(cell, row, tasks) for cell, row in zip(cells, table, strict=True))
    return ResolutionSearch(
        cells=cell_scores,
        chosen=choose_cell(cell_scores),
        num_requests=position_of.size,
        num_evaluations=len(requests),
    )


def choose_cell(cells: Sequence[CellScore]) -> CellScore:
    """The cell with the best score; among equal scores the smallest maximum, then the smallest minimum (cheapest)."""
    return min(cells, key=lambda cell: (-cell.score, cell.max_pixels, cell.min_pixels))


def box_of(values: Sequence[float]) -> Box:
    """Quartiles (linear between neighbours) of the scores of all cells, one box of Figure 4."""
    if not values:
        raise MergeError("values: there is no score to draw. Give the scores of at least one cell.")
    numbers = [float(number) for number in np.percentile(np.asarray(values, dtype=np.float64), [0, 25, 50, 75, 100])]
    return Box(
        minimum=numbers[0],
        lower_quartile=numbers[1],
        median=numbers[2],
        upper_quartile=numbers[3],
        maximum=numbers[4],
    )


def _cell_score(cell: Cell, scores: "np.ndarray[tuple[int], np.dtype[np.float64]]", tasks: Sequence[str]) -> CellScore:
    groups: dict[str, list[float]] = {}
    for task, score in zip(tasks, scores, strict=True):
        groups.setdefault(task, []).append(float(score))
    by_task = {task: fmean(values) for task, values in groups.items()}
    return CellScore(
        min_pixels=cell.min_pixels, max_pixels=cell.max_pixels, score=fmean(by_task.values()), by_task=by_task
    )
