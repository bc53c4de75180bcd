# SPDX-License-Identifier: Apache-2.0
"""Read benchmarks: JSONL files of questions with images and answers.

Comes first in an evaluation. One line: {"id", "task", "images": [paths beside the file], "question" with one <image>
placeholder per image, "answer", "score": "exact" | "point" | "box", "box": [left, top, right, bottom] in pixels of the
first image}. `id`, `task` (name of the file), `images` (none) and `score` (exact) are optional.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from mindvl_merge.errors import EvaluationError

ScoreKind = Literal["exact", "point", "box"]
Box = tuple[float, float, float, float]

IMAGE_MARK = "<image>"

_FIELDS = frozenset({"id", "task", "images", "question", "answer", "score", "box"})


@dataclass(frozen=True, kw_only=True)
class Item:
    """One question."""

    id: str
    task: str
    images: tuple[Path, ...]
    question: str
    answer: str
    score: ScoreKind = "exact"
    box: Box | None = None  # left, top, right, bottom in pixels of the first image


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A named list of questions."""

    name: str
    items: tuple[Item, ...]


def load_benchmarks(path: Path) -> list[Benchmark]:
    """One benchmark from a JSONL file, or one from each JSONL file of a directory, by name.

    Raises:
        EvaluationError: Names file, line and problem.
    """
    if path.is_dir():
        files = sorted(path.glob("*.jsonl"))
        if not files:
            raise EvaluationError(
                f"{path}: the directory has no .jsonl file. Name a benchmark file or a directory of them."
            )
    elif path.is_file():
        files = [path]
    else:
        raise EvaluationError(f"{path}: the benchmark does not exist. Name a .jsonl file or a directory of them.")
    return [Benchmark(name=file.stem, items=tuple(_read_file(file))) for file in files]


def _read_file(path: Path) -> Iterator[Item]:
    seen: set[str] = set()
    number = 0
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise EvaluationError(f"{where}: is not valid JSON ({error}). Write one object per line.") from error
        item = _read_row(row, path, number, where)
        if item.id in seen:
            raise EvaluationError(f"{where}: id {item.id!r} is used twice. Give every line its own id.")
        seen.add(item.id)
        yield item
    if not seen:
        raise EvaluationError(f"{path}: the benchmark is empty. Write one JSON object per line.")


def _read_row(row: Any, path: Path, number: int, where: str) -> Item:
    if not isinstance(row, dict):
        raise EvaluationError(
            f'{where}: must be an object, got {type(row).__name__}. Write {{"question": ..., "answer": ...}}.'
        )
    unknown = sorted(row.keys() - _FIELDS)
    if unknown:
        raise EvaluationError(f"{where}: field {unknown[0]!r} is unknown. Use {', '.join(sorted(_FIELDS))}.")
    for field in ("question", "answer"):
        if not isinstance(row.get(field), str):
            raise EvaluationError(f"{where}: {field} must be text, got {row.get(field)!r}. Correct the line.")
    score = row.get("score", "exact")
    if score not in get_args(ScoreKind):
        raise EvaluationError(f"{where}: score {score!r} is unknown. Use {', '.join(get_args(ScoreKind))}.")
    return Item(
        id=str(row.get("id", f"{path.stem}-{number:05d}")),
        task=str(row.get("task", path.stem)),
        images=_read_images(row, path, where),
        question=row["question"],
        answer=row["answer"],
        score=score,
        box=_read_box(row, score, where),
    )


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
