# SPDX-License-Identifier: Apache-2.0
"""Score a model at every cell of a resolution grid on held-out items, each distinct resize once, and choose a cell.

Comes after merging, before the final test. Most cells resize most images alike (an image inside both limits keeps its
size), so requests with equal model input are merged. Source: the paper's test-time resolution search and
Figure 4. halving.py does the same with fewer evaluations, choice.py chooses and reports.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from mindvl_merge.errors import MergeError
from mindvl_merge.evaluation.choice import CellScore, Holdout, cell_scores, choose_cell, holdout, split_items
from mindvl_merge.evaluation.halving import halved
from mindvl_merge.evaluation.resolution import PAPER_UNIT_SIDE, Cell, ResolutionGrid

Item = TypeVar("Item")
Table = npt.NDArray[np.float64]


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

    def score(self, requests: Sequence[Request[Item]]) -> Sequence[float]:
        """A score for each request, higher is better."""


@runtime_checkable
class CountsVisualTokens(Protocol):
    """A scorer that knows what a cell costs."""

    def num_visual_tokens(self, item: object, min_pixels: int, max_pixels: int) -> int:
        """Visual tokens of all images of `item`."""


@runtime_checkable
class MeasuresTime(Protocol[Item]):
    """A scorer that also knows how long an answer took."""

    def score_timed(self, requests: Sequence[Request[Item]]) -> Sequence[tuple[float, float]]:
        """Score and seconds for each request, instead of `score`; NaN seconds if they are not known."""


@dataclass(frozen=True, kw_only=True)
class ResolutionSearch:
    """Result of a search."""

    cells: tuple[CellScore, ...]
    chosen: CellScore  # best over all tasks
    num_requests: int  # cells times items
    num_evaluations: int  # distinct requests that were run
    chosen_by_task: dict[str, CellScore] = field(default_factory=dict)  # best for each task alone
    num_distinct: dict[str, int] = field(default_factory=dict)  # cells that differ in a task's model input, by task
    holdout: Holdout | None = None  # the chosen cells on items that did not take part in the choice
    unit_pixels: int = PAPER_UNIT_SIDE**2  # area of one visual token, the unit of the grid

    @property
    def num_saved(self) -> int:
        """Evaluations saved by merging equal requests and by stopping cells early."""
        return self.num_requests - self.num_evaluations


class Requests(Generic[Item]):
    """The distinct model inputs of a grid; scores are asked for on demand and kept."""

    def __init__(self, scorer: Scorer[Item], items: Sequence[Item], cells: Sequence[Cell]) -> None:
        self._scorer = scorer
        self._requests: list[Request[Item]] = []
        self.position_of = np.empty((len(cells), len(items)), dtype=np.int64)  # of each cell and item
        for column, item in enumerate(items):
            positions: dict[Hashable, int] = {}
            for row, cell in enumerate(cells):
                key = scorer.resized(item, cell.min_pixels, cell.max_pixels)
                if key not in positions:
                    positions[key] = len(self._requests)
                    self._requests.append(Request(item=item, min_pixels=cell.min_pixels, max_pixels=cell.max_pixels))
                self.position_of[row, column] = positions[key]
        self._scores = np.full(len(self._requests), np.nan)
        self._seconds = np.full(len(self._requests), np.nan)

    @property
    def num_scored(self) -> int:
        """Distinct requests that were run."""
        return int((~np.isnan(self._scores)).sum())

    def scores(self, rows: Sequence[int], columns: Sequence[int]) -> Table:
        """Scores `[rows, columns]`, asking the scorer for those that are not known."""
        wanted = self.position_of[np.ix_(rows, columns)]
        missing = [number for number in np.unique(wanted) if np.isnan(self._scores[number])]
        if missing:
            found = self._ask([self._requests[number] for number in missing])
            if len(found) != len(missing):
                raise MergeError(
                    f"Scorer.score: got {len(found)} scores for {len(missing)} requests. Return one score per request."
                )
            self._scores[missing], self._seconds[missing] = zip(*found, strict=True)
        return self._scores[wanted]

    def seconds(self, row: int, columns: Sequence[int]) -> Table:
        """Seconds of the answers of a cell `[columns]` that were asked for; NaN where they are not known."""
        return self._seconds[self.position_of[row, columns]]

    def _ask(self, requests: Sequence[Request[Item]]) -> Sequence[tuple[float, float]]:
        if isinstance(self._scorer, MeasuresTime):
            return self._scorer.score_timed(requests)
        return [(score, np.nan) for score in self._scorer.score(requests)]

    def num_distinct(self, columns: Sequence[int]) -> int:
        """Number of cells that differ in the model input of these items."""
        return len(np.unique(self.position_of[:, columns], axis=0))


def search_resolution(
    scorer: Scorer[Item],
    items: Sequence[Item],
    grid: ResolutionGrid,
    *,
    tasks: Sequence[str] | None = None,
    halving: bool = False,
    report_share: float = 0.0,
    seed: int = 0,
) -> ResolutionSearch:
    """Score the cells of `grid` on `items` and choose one.

    Args:
        items: Held-out items; the final test must use others.
        tasks: Task of each item. A cell's score is the unweighted mean of its task means; without tasks, of all items.
        halving: Stop cells early that are behind (halving.py), instead of scoring every cell on every item.
        report_share: Share of the items of each task that take no part in the choice; the chosen cells are reported on them.
        seed: Of the order of items, of the split and of the confidence intervals.

    Raises:
        MergeError: There is no item, or `tasks` or the scores have another length.
    """
    if not items:
        raise MergeError("items: there is no item to score. Give a validation set.")
    tasks = ["all"] * len(items) if tasks is None else list(tasks)
    if len(tasks) != len(items):
        raise MergeError(f"tasks: got {len(tasks)} tasks for {len(items)} items. Give one task per item.")
    if not 0 <= report_share < 1:
        raise MergeError(f"report_share: must be at least 0 and below 1, got {report_share}. Use for example 0.5.")
    cells = grid.cells()
    requests = Requests(scorer, items, cells)
    selected, reported = split_items(tasks, report_share, seed)
    tokens = _visual_tokens(scorer, items, cells)
    if halving:
        scored = halved(requests, selected, tasks, tokens, seed=seed)
    else:
        every = list(range(len(cells)))
        scored = {row: (selected, one) for row, one in zip(every, requests.scores(every, selected), strict=True)}
    seconds = [requests.seconds(row, scored[row][0]) for row in range(len(cells))]
    found = cell_scores(cells, scored, tasks, tokens, seconds)
    whole = [cell for cell in found if cell.num_items == len(selected)]
    names = list(dict.fromkeys(tasks[column] for column in selected))
    chosen, by_task = choose_cell(whole), {name: choose_cell(whole, task=name) for name in names}
    num_evaluations = requests.num_scored
    report = None
    if reported:
        wanted = {id(cell): found.index(cell) for cell in (chosen, *by_task.values())}
        rows = {row: requests.scores([row], reported)[0] for row in set(wanted.values())}
        report = holdout(
            chosen, by_task, {key: rows[row] for key, row in wanted.items()}, [tasks[i] for i in reported], seed
        )
    return ResolutionSearch(
        cells=tuple(found),
        chosen=chosen,
        num_requests=len(cells) * len(selected),
        num_evaluations=num_evaluations,
        chosen_by_task=by_task,
        num_distinct={name: requests.num_distinct([i for i, one in enumerate(tasks) if one == name]) for name in names},
        holdout=report,
        unit_pixels=grid.pixels_per_unit,
    )


def _visual_tokens(scorer: Scorer[Item], items: Sequence[Item], cells: Sequence[Cell]) -> Table:
    """Visual tokens `[cells, items]`; zeros if the scorer does not count them."""
    if not isinstance(scorer, CountsVisualTokens):
        return np.zeros((len(cells), len(items)))
    return np.array(
        [[scorer.num_visual_tokens(item, cell.min_pixels, cell.max_pixels) for item in items] for cell in cells], float
    )
