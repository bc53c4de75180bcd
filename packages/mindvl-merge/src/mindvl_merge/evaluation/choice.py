# SPDX-License-Identifier: Apache-2.0
"""Scores of the cells of a resolution search, the choice among them, and their report on other items.

Comes after search.py asked for the scores; the pages of mindvl-cli draw from it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import numpy as np
import numpy.typing as npt

from mindvl_merge.errors import MergeError
from mindvl_merge.evaluation.resolution import Cell

Table = npt.NDArray[np.float64]

_RESAMPLES = 2000
_LOW, _HIGH = 2.5, 97.5


@dataclass(frozen=True, kw_only=True)
class CellScore:
    """Scores of one cell."""

    min_pixels: int
    max_pixels: int
    score: float  # unweighted mean over tasks
    by_task: dict[str, float]
    visual_tokens: float = 0.0  # mean of an item
    num_items: int = 0  # that it was scored on; fewer if a search with halving stopped it
    seconds: float | None = None  # mean of an answer; None if not measured


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean with its 95 % confidence interval, by a bootstrap over items."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Holdout:
    """The choice on items that did not take part in it."""

    num_items: int
    chosen: Interval  # one cell for all tasks
    per_task: Interval  # for each task its own cell
    gain: Interval  # of own cells over one cell for all
    by_task: dict[str, Interval]  # the task's own cell


@dataclass(frozen=True, kw_only=True)
class Box:
    """Five numbers of a box plot."""

    minimum: float
    lower_quartile: float
    median: float
    upper_quartile: float
    maximum: float


def cell_scores(
    cells: Sequence[Cell],
    scored: Mapping[int, tuple[Sequence[int], Table]],
    tasks: Sequence[str],
    tokens: Table,
    seconds: Sequence[Table],
) -> list[CellScore]:
    """Scores of each cell over the items that it was scored on.

    Args:
        scored: Row of each cell -> its items and their scores.
        tokens: Visual tokens `[cells, items]`.
        seconds: Of the answers of each cell; NaN if not measured.
    """
    found = []
    for row, cell in enumerate(cells):
        columns, scores = scored[row]
        by_task = task_means([tasks[column] for column in columns], scores)
        found.append(
            CellScore(
                min_pixels=cell.min_pixels,
                max_pixels=cell.max_pixels,
                score=fmean(by_task.values()),
                by_task=by_task,
                visual_tokens=float(tokens[row].mean()),
                num_items=len(columns),
                seconds=None if np.isnan(seconds[row]).any() else float(seconds[row].mean()),
            )
        )
    return found


def choose_cell(cells: Sequence[CellScore], *, task: str | None = None) -> CellScore:
    """The cell with the best score; among equal scores the one with the fewest visual tokens, then the smallest limits."""

    def order(cell: CellScore) -> tuple[float, float, int, int]:
        score = cell.score if task is None else cell.by_task[task]
        return -score, cell.visual_tokens, cell.max_pixels, cell.min_pixels

    return min(cells, key=order)


def pareto_front(
    cells: Sequence[CellScore], cost: Literal["visual_tokens", "seconds"] = "visual_tokens"
) -> list[CellScore]:
    """Cells for which no other one scores at least as well at a lower cost, from cheap to expensive.

    Cells whose cost is not known are omitted.
    """
    front: list[CellScore] = []
    known = [cell for cell in cells if getattr(cell, cost) is not None]
    for cell in sorted(known, key=lambda one: (getattr(one, cost), -one.score, one.max_pixels, one.min_pixels)):
        if not front or cell.score > front[-1].score:
            front.append(cell)
    return front


def split_items(tasks: Sequence[str], report_share: float, seed: int) -> tuple[list[int], list[int]]:
    """Items for the choice and for the report: a random part of each task, at least one item of each for the choice."""
    generator = np.random.default_rng(seed)
    selected, reported = [], []
    for task in dict.fromkeys(tasks):
        columns = [column for column, one in enumerate(tasks) if one == task]
        shuffled = [columns[place] for place in generator.permutation(len(columns))]
        count = min(round(report_share * len(columns)), len(columns) - 1)
        reported += shuffled[:count]
        selected += shuffled[count:]
    return sorted(selected), sorted(reported)


def task_means(tasks: Sequence[str], scores: Sequence[float] | Table) -> dict[str, float]:
    """Mean score of each task."""
    groups: dict[str, list[float]] = {}
    for task, score in zip(tasks, scores, strict=True):
        groups.setdefault(task, []).append(float(score))
    return {task: fmean(values) for task, values in groups.items()}


def holdout(
    chosen: CellScore, by_task: Mapping[str, CellScore], scores: Mapping[int, Table], tasks: Sequence[str], seed: int
) -> Holdout:
    """Report the choice on items that did not take part in it.

    Args:
        scores: `id` of a chosen cell -> its scores of these items.
        tasks: Task of each of these items.
    """
    generator = np.random.default_rng(seed)
    names = list(dict.fromkeys(tasks))
    columns = {name: np.array([i for i, task in enumerate(tasks) if task == name]) for name in names}
    one, own = scores[id(chosen)], {name: scores[id(by_task[name])] for name in names}
    drawn: dict[str, list[Table]] = {"one": [], "own": []}
    for name in names:
        places = columns[name][generator.integers(0, len(columns[name]), (_RESAMPLES, len(columns[name])))]
        drawn["one"].append(one[places].mean(axis=1))
        drawn["own"].append(own[name][places].mean(axis=1))
    means = {
        "one": fmean(float(one[columns[name]].mean()) for name in names),
        "own": fmean(float(own[name][columns[name]].mean()) for name in names),
    }
    totals = {key: np.mean(values, axis=0) for key, values in drawn.items()}
    return Holdout(
        num_items=len(tasks),
        chosen=_interval(means["one"], totals["one"]),
        per_task=_interval(means["own"], totals["own"]),
        gain=_interval(means["own"] - means["one"], totals["own"] - totals["one"]),
        by_task={
            name: _interval(float(own[name][columns[name]].mean()), resampled)
            for name, resampled in zip(names, drawn["own"], strict=True)
        },
    )


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


def scores_over_grid(cells: Sequence[CellScore]) -> dict[str, list[float]]:
    """Scores by task over the cells that were scored on all items, and those over all tasks as `overall`: Figure 4."""
    most = max(cell.num_items for cell in cells)
    whole = [cell for cell in cells if cell.num_items == most]
    tasks = whole[0].by_task
    by_task = {task: [cell.by_task[task] for cell in whole] for task in tasks}
    return by_task if len(tasks) == 1 else {**by_task, "overall": [cell.score for cell in whole]}


def _interval(mean: float, resampled: Table) -> Interval:
    low, high = np.percentile(resampled, [_LOW, _HIGH])
    return Interval(mean=mean, low=float(low), high=float(high))
