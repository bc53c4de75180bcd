# SPDX-License-Identifier: Apache-2.0
"""A whole evaluation: scores, report, pages."""

import json

from mindvl_cli.evaluation import run
from mindvl_cli.evaluation.benchmark import load_benchmarks
from mindvl_cli.evaluation.predict import Predictor

RIGHT = {"read0": "1", "text0": "1", "point": "(28,28)", "box": "(0,0),(5,5)", "two": "A"}


def test_scores_report_and_pages(model_directory, benchmark_file, tmp_path, monkeypatch):
    predictor = Predictor(model_directory, trust_remote_code=True)
    monkeypatch.setattr(predictor, "_answer", lambda questions: [RIGHT.get(q.item.id, "?") for q in questions])
    benchmarks = load_benchmarks(benchmark_file)
    result = run.evaluate(predictor, benchmarks, out=tmp_path / "out")
    assert {task: round(score.score, 3) for task, score in result.scores.by_task.items()} == {
        "read": 0.333, "text": 0.333, "locate": 0.5, "compare": 1.0,
    }  # fmt: skip
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["overall"] == result.scores.overall
    assert report["by_benchmark"]["mixed"]["by_task"]["locate"] == {"score": 0.5, "num_items": 2}
    page = (tmp_path / "out" / "mixed.html").read_text()
    assert page.count("data:image/png;base64,") == 7
    assert page.count('<em class="wrong">') == 5
