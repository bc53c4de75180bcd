# SPDX-License-Identifier: Apache-2.0
"""Scores of runs stand in the columns of the paper's tables."""

from statistics import fmean

import pytest

from mindvl_merge.errors import EvaluationError
from mindvl_merge.evaluation.paper import paper_table


def _report(**scores):
    return {"metrics": {name.replace("__", "-"): {"overall": score} for name, score in scores.items()}}


def test_benchmarks_are_found_by_the_names_of_their_files():
    report = _report(
        MME=80.0, MMBench_DEV_EN_V11=70.0, OCRBench=60.0, DocVQA_VAL=90.0, ChartQA_TEST=50.0, InfoVQA_VAL=40.0
    )
    table = paper_table(6, {"run": report})
    assert table.columns == ("MME", "MMBench", "OCRBench", "DocVQA", "ChartQA", "InfoVQA", "Overall")
    assert table.runs == {"run": (80.0, 70.0, 60.0, 90.0, 50.0, 40.0, 65.0)}
    assert table.benchmarks["run"]["MMBench"] == "MMBench_DEV_EN_V11"
    assert table.paper["MindVL-8B"] == (84.1, 84.3, 87.6, 94.7, 87.2, 81.1, 86.5)


def test_a_missing_benchmark_leaves_the_mean_open_and_relatives_do_not_count():
    table = paper_table(8, {"run": _report(MME__RealWorld=1.0, OCRBench_v2=2.0, MMMU_Pro_10c=3.0, MMVet=4.0, mine=5.0)})
    assert dict(zip(table.columns, table.runs["run"], strict=True)) == {
        **dict.fromkeys(("MMBench", "OCRBench", "DocVQA", "ChartQA", "InfoVQA", "AI2D", "MathVista", "MathVision")),
        "MMVet": 4.0, "MMMU-Pro": 3.0, "Overall": None,
    }  # fmt: skip
    assert paper_table(2, {"run": _report(MME__RealWorld=1.0, MMVet=4.0)}).runs["run"] == (None,) * 7


@pytest.mark.parametrize("number", [2, 6, 8])
def test_the_means_of_the_paper_follow_from_its_figures(number):
    rows = dict(paper_table(number, {}).paper)
    if number == 2:  # the paper has 79.9
        assert fmean(rows.pop("Keye-VL-8B")[:-1]) == pytest.approx(79.65)
    for row in rows.values():
        assert fmean(row[:-1]) == pytest.approx(row[-1], abs=0.0501)


def test_wrong_reports_are_refused():
    with pytest.raises(EvaluationError, match=r"table: 3 is unknown. Known tables: 2, 6, 8"):
        paper_table(3, {})
    with pytest.raises(EvaluationError, match="run: the report has no metrics"):
        paper_table(2, {"run": {}})
    with pytest.raises(EvaluationError, match="MMBench_DEV_EN and MMBench_DEV_CN both belong to the column MMBench"):
        paper_table(2, {"run": _report(MMBench_DEV_EN=1.0, MMBench_DEV_CN=2.0)})
