# SPDX-License-Identifier: Apache-2.0
"""Compare answers with the truth, and aggregate scores by task.

Coordinates are text such as `(x,y)` and `(x1,y1),(x2,y2)`, or lists as in the JSON answers of Qwen2.5-VL and Qwen3-VL.
Their unit depends on the model; they are scaled to the original image before the comparison.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from mindvl_merge.evaluation.benchmark import Box, Item

Size = tuple[int, int]  # height, width in pixels

MIN_OVERLAP = 0.5  # minimum intersection over union of a correct box, as in RefCOCO

_NUMBER = r"\s*(-?\d+(?:\.\d+)?)\s*"
_POINT = re.compile(rf"\({_NUMBER},{_NUMBER}\)")
_LIST = re.compile(rf"\[{_NUMBER},{_NUMBER}(?:,{_NUMBER},{_NUMBER})?\]")  # a point [x, y] or a box [x1, y1, x2, y2]


@dataclass(frozen=True, kw_only=True)
class TaskScore:
    """Mean score of a task, from 0 to 1."""

    score: float
    num_items: int


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Scores of a model."""

    overall: float  # unweighted mean over tasks, as in the paper
    by_task: dict[str, TaskScore]


def score_answer(item: Item, answer: str, *, original: Size | None = None, unit: Size | None = None) -> float:
    """1.0 for a correct answer, else 0.0.

    Args:
        original, unit: Size of the item's first image in pixels and in the unit of coordinates; needed for `point` and `box`.
    """
    if item.score == "exact":
        return float(_plain(answer) == _plain(item.answer))
    assert item.box is not None
    assert original is not None
    assert unit is not None
    points = find_points(answer, original=original, unit=unit)
    if item.score == "point":
        return float(len(points) == 1 and _is_inside(points[0], item.box))
    if len(points) != 2:
        return 0.0
    return float(overlap((*points[0], *points[1]), item.box) >= MIN_OVERLAP)


def find_points(answer: str, *, original: Size, unit: Size) -> list[tuple[float, float]]:
    """All `(x,y)` of a text, or without one all pairs of its lists, scaled to pixels of the original image."""
    scale_y, scale_x = original[0] / unit[0], original[1] / unit[1]
    found = _POINT.findall(answer)
    if not found:
        found = [pair for one in _LIST.findall(answer) for pair in (one[:2], one[2:]) if pair[0]]
    return [(float(x) * scale_x, float(y) * scale_y) for x, y in found]


def overlap(first: Box, second: Box) -> float:
    """Intersection over union of two boxes; 0 for a box with negative size."""
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    if width <= 0 or height <= 0:
        return 0.0
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (first, second)]
    return width * height / (sum(areas) - width * height)


def gather(items: Sequence[Item], scores: Sequence[float]) -> Scores:
    """Mean by task, and the unweighted mean of those."""
    groups: dict[str, list[float]] = {}
    for item, score in zip(items, scores, strict=True):
        groups.setdefault(item.task, []).append(score)
    by_task = {task: TaskScore(score=fmean(values), num_items=len(values)) for task, values in groups.items()}
    return Scores(overall=fmean(score.score for score in by_task.values()), by_task=by_task)


def _plain(text: str) -> str:
    return " ".join(text.split())


def _is_inside(point: tuple[float, float], box: Box) -> bool:
    return box[0] <= point[0] <= box[2] and box[1] <= point[1] <= box[3]
