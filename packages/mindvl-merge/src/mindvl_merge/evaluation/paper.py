# SPDX-License-Identifier: Apache-2.0
"""Scores of runs in the tables of the paper: Tables 2, 6 and 8.

Comes after run.py, whose reports it reads; paper_tables.json has the paper's figures and their source.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from statistics import fmean
from typing import Any

from mindvl_merge.errors import EvaluationError

OVERALL = "Overall"


@dataclass(frozen=True, kw_only=True)
class PaperTable:
    """A table of the paper with the scores of runs; scores from 0 to 100, None if a run has no such benchmark."""

    number: int
    source: str
    note: str
    columns: tuple[str, ...]  # benchmarks, then OVERALL: their mean, if a run has all of them
    paper: dict[str, tuple[float, ...]]  # by model
    runs: dict[str, tuple[float | None, ...]]  # by the name of the run
    benchmarks: dict[str, dict[str, str]]  # by run: the name of the file whose score is in a column


def paper_table(number: int, reports: Mapping[str, Mapping[str, Any]]) -> PaperTable:
    """A table of the paper beside the scores of runs.

    Args:
        number: 2, 6 or 8.
        reports: Name of each run -> `Evaluation.report()`, or the content of its `report.json`.

    Raises:
        EvaluationError: The table is unknown, a report has no metrics, or two benchmarks of a report belong to one column.
    """
    data = _data()
    if str(number) not in data["tables"]:
        raise EvaluationError(f"table: {number} is unknown. Known tables: {', '.join(data['tables'])}.")
    table = data["tables"][str(number)]
    names = table["columns"]
    found = {run: _columns(run, report, names) for run, report in reports.items()}
    runs = {}
    for run, columns in found.items():
        scores = [columns[name][1] if name in columns else None for name in names]
        known = [score for score in scores if score is not None]
        runs[run] = (*scores, fmean(known) if len(known) == len(names) else None)
    return PaperTable(
        number=number,
        source=data["source"],
        note=data["notes"][str(number)],
        columns=(*names, OVERALL),
        paper={model: tuple(row) for model, row in table["rows"].items()},
        runs=runs,
        benchmarks={run: {name: title for name, (title, _) in columns.items()} for run, columns in found.items()},
    )


def _columns(run: str, report: Mapping[str, Any], names: list[str]) -> dict[str, tuple[str, float]]:
    """Column -> name and overall score of the benchmark that belongs to it."""
    metrics = report.get("metrics")
    if not isinstance(metrics, Mapping):
        raise EvaluationError(f"{run}: the report has no metrics. Give the directory of `mindvl eval --out`.")
    found: dict[str, tuple[str, float]] = {}
    for title, scores in metrics.items():
        key = re.sub("[^a-z0-9]", "", title.lower())
        column = next((name for name in names if any(re.match(one, key) for one in _data()["columns"][name])), None)
        if column is None:
            continue
        if column in found:
            raise EvaluationError(
                f"{run}: {found[column][0]} and {title} both belong to the column {column}. Evaluate one of them."
            )
        found[column] = (title, float(scores["overall"]))
    return found


@cache
def _data() -> dict[str, Any]:
    text = files("mindvl_merge.evaluation").joinpath("paper_tables.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    return data
