# SPDX-License-Identifier: Apache-2.0
"""`mindvl eval` prints a table or JSON and leaves a report."""

import json

import pytest
from click.testing import CliRunner

from mindvl_cli.commands.eval import evaluate
from mindvl_merge.evaluation import Predictor


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A directory that answers 2 to everything; the real model is tested beside predict.py."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    monkeypatch.setattr(Predictor, "fingerprint", "f")
    monkeypatch.setattr(Predictor, "default_limits", (784, 7840))
    monkeypatch.setattr(Predictor, "_length", lambda self, question: 1)
    monkeypatch.setattr(Predictor, "sizes", lambda self, item, low, high: ())
    monkeypatch.setattr(Predictor, "_answer", lambda self, questions: ["2"] * len(questions))
    (tmp_path / "sum.jsonl").write_text('{"question": "1+1", "answer": "2"}\n{"question": "1+2", "answer": "3"}\n')
    return directory


def test_a_table_is_shown_and_a_report_left(model, tmp_path):
    arguments = [str(model), "-b", str(tmp_path / "sum.jsonl"), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(evaluate, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert "overall" in result.stdout
    assert "50.0" in result.stdout
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"report.json", "sum.html", "predictions.jsonl"}


def test_json_is_one_document(model, tmp_path):
    arguments = [str(model), "-b", str(tmp_path / "sum.jsonl"), "--json", "--max-pixels", "1568"]
    result = CliRunner().invoke(evaluate, arguments, catch_exceptions=False)
    document = json.loads(result.stdout)
    assert (document["overall"], document["min_pixels"], document["max_pixels"]) == (0.5, 784, 1568)


def test_a_tsv_is_scored_as_its_benchmark_and_the_reason_is_shown(model, tmp_path):
    path = tmp_path / "ChartQA_TEST.tsv"
    path.write_text("index\tquestion\tanswer\tsplit\n1\tsum?\t1.96\thuman\n2\tmean?\t9\taugmented\n")
    arguments = [str(model), "-b", str(path), "--json", "--compat", "lmms-eval"]
    result = CliRunner().invoke(evaluate, arguments, catch_exceptions=False)
    document = json.loads(result.stdout)
    assert document["metrics"] == {"ChartQA_TEST": {"overall": 50.0, "human": 100.0, "augmented": 0.0}}
    assert (document["overall"], document["compat"]) == (0.5, "lmms-eval")
    assert "scored as ChartQA_TEST (relaxed_accuracy), because of the name 'ChartQA_TEST'" in result.stderr


def test_a_benchmark_that_needs_a_judge_is_refused_before_a_question_is_asked(model, tmp_path, monkeypatch):
    monkeypatch.setattr(Predictor, "_answer", lambda self, questions: pytest.fail("asked"))
    (tmp_path / "vet.tsv").write_text("index\tquestion\tanswer\n1\tq\ta\n")
    arguments = [str(model), "-b", str(tmp_path / "vet.tsv"), "--kind", "mmvet"]
    result = CliRunner().invoke(evaluate, arguments)
    assert "mmvet needs a judge" in str(result.exception)
