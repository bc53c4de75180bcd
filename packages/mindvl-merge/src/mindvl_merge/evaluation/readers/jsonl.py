# SPDX-License-Identifier: Apache-2.0
"""Items of our JSONL benchmarks.

One line: {"id", "task", "images": [paths beside the file], "question" with one <image> placeholder per image, "answer",
"score": "exact" | "point" | "box", "box": [left, top, right, bottom] in pixels of the first image}. `id`, `task` (name of
the file), `images` (none) and `score` (exact) are optional. With "metric", the line is scored by that metric, `answer`
may be a list, and `choices` and the options of the metric may be given.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from mindvl_merge.errors import EvaluationError
from mindvl_merge.evaluation.benchmark import IMAGE_MARK, Box, Item, ScoreKind
from mindvl_merge.evaluation.metrics.registry import OPTIONS, find_metric

_FIELDS = frozenset({"id", "task", "images", "question", "answer", "score", "box", "metric"})


def read_jsonl(path: Path, *, metric: str | None = None) -> tuple[Item, ...]:
    """Items of a file.

    Args:
        metric: Metric of lines that name none.

    Raises:
        EvaluationError: Every wrong line, with file, line and problem.
    """
    items: list[Item] = []
    problems: list[str] = []
    seen: set[str] = set()
    for number, row, where in _rows(path, problems):
        try:
            item = _read_row(row, path, number, where, metric)
        except EvaluationError as error:
            problems.append(str(error))
            continue
        if item.id in seen:
            problems.append(f"{where}: id {item.id!r} is used twice. Give every line its own id.")
        seen.add(item.id)
        items.append(item)
    if problems:
        raise EvaluationError(*problems)
    if not items:
        raise EvaluationError(f"{path}: the benchmark is empty. Write one JSON object per line.")
    return tuple(items)


def _rows(path: Path, problems: list[str]) -> Iterator[tuple[int, Any, str]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise EvaluationError(f"{path}: is not UTF-8 ({error.reason}). Convert the file.") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            yield number, json.loads(line), where
        except ValueError as error:
            problems.append(f"{where}: is not valid JSON ({error}). Write one object per line.")


def _read_row(row: Any, path: Path, number: int, where: str, metric: str | None) -> Item:
    if not isinstance(row, dict):
        raise EvaluationError(
            f'{where}: must be an object, got {type(row).__name__}. Write {{"question": ..., "answer": ...}}.'
        )
    metric = row.get("metric", metric)
    known = _FIELDS | (OPTIONS if metric else frozenset())
    unknown = sorted(row.keys() - known)
    if unknown:
        raise EvaluationError(f"{where}: field {unknown[0]!r} is unknown. Use {', '.join(sorted(known))}.")
    if not isinstance(row.get("question"), str):
        raise EvaluationError(f"{where}: question must be text, got {row.get('question')!r}. Correct the line.")
    answers: Any = row.get("answer")
    is_list = bool(metric) and isinstance(answers, list) and bool(answers) and all(isinstance(a, str) for a in answers)
    if not isinstance(answers, str) and not is_list:
        raise EvaluationError(f"{where}: answer must be text, got {answers!r}. Correct the line.")
    score = row.get("score", "exact")
    if score not in get_args(ScoreKind):
        raise EvaluationError(f"{where}: score {score!r} is unknown. Use {', '.join(get_args(ScoreKind))}.")
    options = {name: row[name] for name in OPTIONS & row.keys() if name not in ("question", "prompt")}
    return Item(
        id=str(row.get("id", f"{path.stem}-{number:05d}")),
        task=str(row.get("task", path.stem)),
        images=_read_images(row, path, where),
        question=row["question"],
        answer=answers if isinstance(answers, str) else answers[0],
        score=score,
        box=_read_box(row, score, where),
        metric=_metric(metric, where),
        references=answers,
        options=options if metric else {},
        fields={name: row[name] for name in ("category", "split") if name in row},
    )


def _metric(name: Any, where: str) -> str | None:
    if name is None:
        return None
    try:
        return find_metric(str(name)).name
    except EvaluationError as error:
        raise EvaluationError(f"{where}: {error}") from error


def _read_images(row: dict[str, Any], path: Path, where: str) -> tuple[Path, ...]:
    names = row.get("images", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise EvaluationError(
            f"{where}: images must be a list of paths, got {names!r}. Give paths relative to the file."
        )
    marks = row["question"].count(IMAGE_MARK)
    if marks != len(names):
        raise EvaluationError(
            f"{where}: question has {marks} {IMAGE_MARK} placeholders for {len(names)} images. Write one per image."
        )
    images = tuple(path.parent / name for name in names)
    for image in images:
        if not image.is_file():
            raise EvaluationError(
                f"{where}: image {image} does not exist. Correct the path; it is relative to the file."
            )
    return images


def _read_box(row: dict[str, Any], score: str, where: str) -> Box | None:
    values = row.get("box")
    if values is None:
        if score != "exact":
            raise EvaluationError(f"{where}: score {score!r} needs a box. Give [left, top, right, bottom] in pixels.")
        return None
    numbers = isinstance(values, list) and len(values) == 4 and all(isinstance(v, int | float) for v in values)
    if not numbers or values[0] >= values[2] or values[1] >= values[3] or not row.get("images"):
        raise EvaluationError(
            f"{where}: box {values!r} is not valid. Give [left, top, right, bottom] in pixels of the first image."
        )
    return (float(values[0]), float(values[1]), float(values[2]), float(values[3]))
