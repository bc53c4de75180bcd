# SPDX-License-Identifier: Apache-2.0
"""Score a model at every cell of a resolution grid on held-out items, each distinct resize once, and choose a cell.

Comes after merging, before the final test. Most cells resize most images alike (an image inside both limits keeps its
size), so requests are joined by what the model would really see. Source: the paper's test-time resolution search and
Figure 4.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Generic, Protocol, TypeVar

import numpy as np

from .errors import MergeError
from .resolution import Cell, ResolutionGrid

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class Request(Generic[Item]):
    """Answer this item with these limits."""

    item: Item
    min_pixels: int
    max_pixels: int


class Scorer(Protocol[Item]):
    """What a search needs of an evaluation; mindvl_cli.evaluation has one."""

    def resized(self, item: Item, min_pixels: int, max_pixels: int) -> Hashable:
        """A key that is equal for two limits exactly if the model sees the same input for `item`."""
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
    num_evaluations: int  # distinct ones, what was really run

    @property
    def num_saved(self) -> int:
        """Evaluations that joining identical resizes saved."""
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
        MergeError: There is no item, or `tasks` or the scorer's answer has another length.
    """
    if not items:
        raise MergeError("there is no item to score. search_resolution: items. Give a validation set.")
    tasks = ["all"] * len(items) if tasks is None else tasks
    if len(tasks) != len(items):
        raise MergeError(f"{len(tasks)} tasks for {len(items)} items. search_resolution: tasks. Give one per item.")
    cells = grid.cells()
    places: dict[tuple[int, Hashable], int] = {}
    requests: list[Request[Item]] = []
    place_of = np.empty((len(cells), len(items)), dtype=np.int64)
    for column, item in enumerate(items):
        for row, cell in enumerate(cells):
            key = (column, scorer.resized(item, cell.min_pixels, cell.max_pixels))
            if key not in places:
                places[key] = len(requests)
                requests.append(Request(item=item, min_pixels=cell.min_pixels, max_pixels=cell.max_pixels))
            place_of[row, column] = places[key]
    scores = list(scorer.score(requests))
    if len(scores) != len(requests):
        raise MergeError(f"{len(scores)} scores for {len(requests)} requests. Scorer.score. Return one per request.")
    table = np.asarray(scores, dtype=np.float64)[place_of]  # [cells, items]
    cell_scores = tuple(_cell_score(cell, row, tasks) for cell, row in zip(cells, table, strict=True))
    return ResolutionSearch(
        cells=cell_scores,
        chosen=choose_cell(cell_scores),
        num_requests=place_of.size,
        num_evaluations=len(requests),
    )


def choose_cell(cells: Sequence[CellScore]) -> CellScore:
    """The best score; of equal ones the smaller maximum, then the smaller minimum, which is the cheapest to run."""
    return min(cells, key=lambda cell: (-cell.score, cell.max_pixels, cell.min_pixels))


def box_of(values: Sequence[float]) -> Box:
    """Quartiles (linear between neighbours) of the scores of all cells, one box of Figure 4."""
    if not values:
        raise MergeError("there is no score to draw. box_of: values. Give the scores of at least one cell.")
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
