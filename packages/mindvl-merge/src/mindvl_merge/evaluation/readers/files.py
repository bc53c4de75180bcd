# SPDX-License-Identifier: Apache-2.0
"""Recognize benchmark files by their content, find the benchmark they belong to, and read them.

Comes first in an evaluation. Nothing is downloaded.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from mindvl_merge.errors import EvaluationError
from mindvl_merge.evaluation.benchmark import Benchmark, ImageSource, Item
from mindvl_merge.evaluation.metrics.options import Compat, is_missing, read_compat
from mindvl_merge.evaluation.metrics.registry import find_metric
from mindvl_merge.evaluation.readers import parquet, tsv
from mindvl_merge.evaluation.readers.arena import is_arena, read_arena
from mindvl_merge.evaluation.readers.jsonl import read_jsonl
from mindvl_merge.evaluation.readers.rows import (
    ANSWER_COLUMNS,
    GPQA_COLUMNS,
    ID_COLUMNS,
    IMAGE_COLUMNS,
    QUESTION_COLUMNS,
    Kind,
    Place,
    Row,
    read_row,
)

Format = Literal["jsonl", "tsv", "parquet"]

MAX_PROBLEMS = 20  # listed in one error

_SUFFIXES = (".jsonl", ".tsv", ".parquet")
_NAMED_PARENTS = 3  # directories above a file whose names are looked at
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")
# Columns that only one benchmark has, for files whose name says nothing.
_COLUMNS = (
    ({"instruction_id_list"}, "ifeval"),
    (set(GPQA_COLUMNS), "gpqa"),
    ({"gt_answer", "set_id", "figure_id"}, "hallusionbench"),
    ({"answer_type", "question_type", "precision"}, "mathvista"),
    ({"capability"}, "mmvet"),
)


def load_benchmarks(
    path: Path, *, kind: str | None = None, compat: str = "vlmevalkit", baseline: Path | None = None
) -> list[Benchmark]:
    """Benchmarks of a file or a directory; parquet shards of one split are one benchmark.

    Args:
        kind: Benchmark or metric of the files; by default found from their names, then from their columns.
        compat: Project whose prompts are built.
        baseline: Replies of the baseline model, for questions in the format of Arena-Hard.

    Raises:
        EvaluationError: All problems of a file, each with its line.
    """
    rules = read_compat(compat)
    if kind is not None:
        find_metric(kind)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES and file.is_file())
        if not files:
            raise EvaluationError(f"{path}: the directory has no .jsonl, .tsv or .parquet file. Name a benchmark file.")
    elif path.is_file():
        files = [path]
    else:
        raise EvaluationError(f"{path}: the benchmark does not exist. Name a file or a directory of files.")
    groups: dict[Path, list[Path]] = {}
    for file in files:
        groups.setdefault(file.with_name(_SHARD.sub("", file.stem) + file.suffix), []).append(file)
    return [_load(group, name.stem, kind, rules, baseline) for name, group in groups.items()]


def recognize(path: Path) -> tuple[Format, str]:
    """The format of a file, and the reason, from its first bytes.

    Raises:
        EvaluationError: It is none of the known ones.
    """
    with path.open("rb") as file:
        head = file.read(65536)
    if head[:4] == b"PAR1":
        return "parquet", "the file begins with PAR1"
    text = head.decode("utf-8-sig", errors="replace").lstrip()
    first = text.partition("\n")[0]
    if text.startswith("{") or not text:
        return "jsonl", "the first line is a JSON object"
    columns = [cell.strip().strip('"') for cell in first.split("\t")]
    if len(columns) > 1:
        return "tsv", f"the first line has {len(columns)} tab-separated columns"
    if text.startswith(("[", "1", "2", "3", "4", "5", "6", "7", "8", "9")) or path.suffix == ".jsonl":
        return "jsonl", "the suffix is .jsonl"
    raise EvaluationError(
        f"{path}: is neither parquet, a table with tab-separated columns, nor JSON lines; it begins with {first[:60]!r}. "
        "Convert the file to one of these formats."
    )


def find_kind(files: Sequence[Path], name: str, columns: Sequence[str], kind: str | None) -> tuple[str, str, str]:
    """Name and kind of a benchmark, and the reason: the option, the names of file and directories, or the columns."""
    if kind is not None:
        return name, kind, f"--kind {kind}"
    for part in (name, *(parent.name for parent in files[0].parents[:_NAMED_PARENTS])):
        candidates = (part, *reversed([part[: found.start()] for found in re.finditer(r"[-_. ]", part)]))
        for candidate in filter(None, candidates):
            try:
                find_metric(candidate)
            except EvaluationError:
                continue
            return (name if part == name else f"{part}_{name}"), candidate, f"the name {part!r}"
    for needed, metric in _COLUMNS:
        if needed <= set(columns):
            return name, metric, f"the columns {', '.join(sorted(needed))}"
    has_choices = {"A", "B"} <= set(columns) or "options" in columns
    return name, "multiple_choice" if has_choices else "exact_match", "no known benchmark in its name or columns"


def _load(files: Sequence[Path], name: str, kind: str | None, compat: Compat, baseline: Path | None) -> Benchmark:
    format, reason = recognize(files[0])
    note = f"{files[0]}: read as {format}, because {reason}"
    if format == "jsonl" and is_arena(_first_row(files[0])):
        note = f"{note}; scored as arena_hard against {baseline}, because of its fields"
        return Benchmark(name=name, items=read_arena(files[0], baseline), kind="arena_hard", notes=(note,))
    if format == "jsonl":
        metric = None if kind is None else find_metric(kind).name
        items = read_jsonl(files[0], metric=metric)
        metrics = {item.metric for item in items}
        return Benchmark(
            name=name, items=items, kind=kind or (metrics.pop() if len(metrics) == 1 else None), notes=(note,)
        )
    columns, rows = tsv.read_tsv(files[0]) if format == "tsv" else parquet.read_parquet(files)
    title, found, why = find_kind(files, name, columns, kind)
    metric = find_metric(found).name
    _require_columns(files[0], columns, metric)
    is_tsv = format == "tsv"
    items, omitted = _items(rows, Kind(name=title, metric=find_metric(metric), compat=compat), columns, is_tsv=is_tsv)
    notes = [f"{note}; scored as {found} ({metric}), because of {why}"]
    if omitted:
        notes.append(f"{files[0]}: {omitted} rows without an image are omitted, as VLMEvalKit does")
    return Benchmark(name=title, items=items, kind=found, notes=tuple(notes))


def _first_row(path: Path) -> Any:
    """The first line of a file as JSON; None if it is not valid."""
    with path.open("rb") as file:
        try:
            return json.loads(next((line for line in file if line.strip()), b"null"))
        except ValueError:
            return None


def _items(
    rows: Sequence[tuple[Place, Row]], kind: Kind, columns: Sequence[str], *, is_tsv: bool
) -> tuple[tuple[Item, ...], int]:
    by_index = {str(row.get("index")): str(row.get("image") or "") for _, row in rows} if is_tsv else {}
    has_images = any(name in columns for name in IMAGE_COLUMNS)
    items: list[Item] = []
    problems: list[str] = []
    seen: dict[str, Place] = {}
    omitted = 0
    for place, row in rows:
        try:
            images: Sequence[ImageSource] = (
                tsv.images_of(row, place, by_index) if is_tsv else parquet.images_of(row, place)
            )
            if has_images and not images:
                omitted += 1
                continue
            item = read_row(row, place, kind, images)
        except EvaluationError as error:
            problems.extend(error.problems)
            continue
        if item.id in seen and any(not is_missing(row.get(name)) for name in ID_COLUMNS):
            problems.append(f"{place}: id {item.id!r} is also that of {seen[item.id]}. Give every row its own id.")
        seen[item.id] = place
        items.append(item)
    if problems:
        more = len(problems) - MAX_PROBLEMS
        raise EvaluationError(*problems[:MAX_PROBLEMS], *([f"{rows[0][0].path}: {more} more problems."] * (more > 0)))
    if not items:
        raise EvaluationError(f"{rows[0][0].path}: no row has an image. Use the file that has the images embedded.")
    return tuple(items), omitted


def _require_columns(path: Path, columns: Sequence[str], metric: str) -> None:
    missing = []
    if not any(name in columns for name in QUESTION_COLUMNS) and metric != "mmmu_pro":
        missing.append(f"a question ({', '.join(QUESTION_COLUMNS)})")
    if not any(name in columns for name in ANSWER_COLUMNS) and find_metric(metric).needs_references:
        missing.append(f"an answer ({', '.join(ANSWER_COLUMNS)})")
    if missing:
        raise EvaluationError(
            f"{path}: has no column for {' and '.join(missing)}; its columns are {', '.join(columns)}. Add the column."
        )
