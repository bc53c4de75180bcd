# SPDX-License-Identifier: Apache-2.0
"""The reference page of the metrics is true: names, rules and every example."""

import ast
import re
from pathlib import Path

import pytest

from mindvl_merge.evaluation import METRICS, score

PAGE = Path(__file__).parents[5] / "docs" / "reference" / "evaluation-metrics.md"
COMPATS = ("vlmevalkit", "lmms-eval", "strict")


def _table(section: str) -> list[list[str]]:
    """The cells of the table in a section, without its header."""
    text = PAGE.read_text(encoding="utf-8").partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    rows = [line for line in text.splitlines() if line.startswith("|")][2:]
    return [[cell.strip().strip("`") for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]


def test_the_page_lists_every_metric_with_its_names_and_rules():
    names = {row[0]: [] if row[1] == "-" else re.findall(r"[^`, ]+", row[1]) for row in _table("Names")}
    assert names == {metric.name: list(metric.aliases) for metric in METRICS.values()}
    assert [row[0] for row in _table("Rules")] == list(METRICS)
    assert all(len(row) == 5 and all(row) for row in _table("Rules"))


@pytest.mark.parametrize("row", _table("Examples"), ids=lambda row: f"{row[0]}-{row[1]}"[:40])
def test_an_example_of_the_page_has_the_scores_that_it_states(row):
    answer, references, options = (ast.literal_eval(cell.replace("\\|", "|") or "{}") for cell in row[1:4])
    scores = [score(row[0], answer, references, compat, **options) for compat in COMPATS]
    assert scores == pytest.approx([float(cell) for cell in row[4:]], abs=5e-4)
