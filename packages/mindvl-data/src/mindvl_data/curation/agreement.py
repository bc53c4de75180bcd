# SPDX-License-Identifier: Apache-2.0
"""When annotations of two models are the same: answers after normalization, boxes by overlap, points by distance.

Used by annotations.py. Annotations are JSON values: texts, numbers, lists, or objects such as {"action": "click",
"point": [x, y]}. B.1.5, B.1.6.
"""

import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:e[-+]?\d+)?%?")
_LATEX = re.compile(r"\\(?:boxed|text|mathrm|mathbf|operatorname)\s*\{([^{}]*)\}|\\[,;!]|\\left|\\right|\$")
_OPTION = re.compile(r"^(?:option|answer|choice)?\s*(?:is)?\s*[:\s]*[(\[]?\s*([a-z])\s*[)\].:]?$")
_PUNCTUATION = re.compile(r"[^\w\s.%/+*=<>^-]")


@dataclass(frozen=True)
class Tolerance:
    """How different two annotations may be.

    Attributes:
        min_iou: Smallest overlap of two boxes, intersection over union.
        max_distance: Largest distance of two points, in pixels.
        relative: Largest relative difference of two numbers.
    """

    min_iou: float = 0.5
    max_distance: float = 28.0
    relative: float = 1e-3


def normalized(text: str) -> str:
    """A text without differences of case, width, articles, punctuation, LaTeX markup, and around an option letter."""
    text = unicodedata.normalize("NFKC", text).casefold().strip()
    for _ in range(3):  # nested commands
        text = _LATEX.sub(lambda match: match[1] or "", text)
    text = re.sub(r"\\d?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"\1/\2", text).strip()
    if option := _OPTION.match(text):
        return option[1]
    text = re.sub(r"(?<=\d),(?=\d{3})", "", text)
    text = _ARTICLES.sub(" ", _PUNCTUATION.sub(" ", text))
    return " ".join(text.split()).strip(" .")


def number_of(text: str) -> float | None:
    """The number that a whole text is, with separators of thousands or a percent sign; otherwise None."""
    text = unicodedata.normalize("NFKC", text).strip().strip("$").strip().lower()
    if not any(map(str.isdigit, text)) or not _NUMBER.fullmatch(text):
        return None
    value = float(text.rstrip("%").replace(",", ""))
    return value / 100 if text.endswith("%") else value


def same(first: Any, second: Any, tolerance: Tolerance, key: str = "") -> bool:
    """True if two annotations agree; objects agree if they have the same keys with values that agree."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(same(first[name], second[name], tolerance, name) for name in first)
    if _is_numbers(first, 4) and _is_numbers(second, 4):
        return iou(first, second) >= tolerance.min_iou
    if _is_numbers(first, 2) and _is_numbers(second, 2):
        return math.dist(first, second) <= tolerance.max_distance
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(same(a, b, tolerance) for a, b in zip(first, second, strict=True))
    if isinstance(first, bool | None) or isinstance(second, bool | None):
        return first is second
    one, two = (number_of(value) if isinstance(value, str) else value for value in (first, second))
    if isinstance(one, int | float) and isinstance(two, int | float):
        return math.isclose(one, two, rel_tol=tolerance.relative, abs_tol=1e-9)
    return isinstance(first, str) and isinstance(second, str) and normalized(first) == normalized(second)


def iou(first: Sequence[float], second: Sequence[float]) -> float:
    """Intersection over union of two boxes x1, y1, x2, y2; 0 if one of them is empty."""
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    shared = max(width, 0.0) * max(height, 0.0)
    union = _area(first) + _area(second) - shared
    return shared / union if union > 0 else 0.0


def majority(values: Sequence[Any], tolerance: Tolerance) -> tuple[list[int], Any]:
    """The largest group of annotations that agree with one of them, and their merged value.

    Returns:
        Positions of the group (of equally large groups the one of the earliest annotation), and the value: that of the
        annotation, with the median of the boxes, points and numbers of the group in place of its own.
    """
    groups = [[other for other, value in enumerate(values) if same(one, value, tolerance)] for one in values]
    best = max(range(len(values)), key=lambda index: (len(groups[index]), -index))
    members = [values[index] for index in groups[best]]
    return groups[best], _merged(values[best], members)


def _merged(value: Any, members: Sequence[Any]) -> Any:
    if isinstance(value, Mapping):
        return {name: _merged(one, [member[name] for member in members]) for name, one in value.items()}
    if _is_numbers(value, 4) or _is_numbers(value, 2):
        return [_median([member[axis] for member in members]) for axis in range(len(value))]
    return value


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _is_numbers(value: Any, count: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) == count
        and all(isinstance(one, int | float) and not isinstance(one, bool) and math.isfinite(one) for one in value)
    )


def _area(box: Sequence[float]) -> float:
    return max(box[2] - box[0], 0.0) * max(box[3] - box[1], 0.0)
