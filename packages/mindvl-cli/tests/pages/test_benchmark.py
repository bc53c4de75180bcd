# SPDX-License-Identifier: Apache-2.0
"""The page shows items evenly, in full, and escapes what comes from outside."""

import json

from mindvl_cli.pages.benchmark import even_choice, write_evaluation, write_page
from mindvl_cli.predictor import make_predictor
from mindvl_merge.evaluation import Item, PredictConfig, Prediction, evaluate, load_benchmarks

RIGHT = {"read0": "1", "text0": "1", "point": "(28,28)", "box": "(0,0),(5,5)", "two": "A"}


def test_items_are_taken_at_even_distances():
    assert even_choice(3, 10) == [0, 1, 2]
    assert even_choice(10, 4) == [0, 2, 5, 7]


def test_answers_cannot_write_html(tmp_path):
    item = Item(id="<i>", task="t", images=(), question="<b>?", answer="1")
    prediction = Prediction(item=item, answer="<script>", original=(), resized=())
    write_page(tmp_path / "page.html", name="a<b", predictions=[prediction] * 100, scores=[0.0] * 100)
    page = (tmp_path / "page.html").read_text()
    assert "<script>" not in page
    assert page.count("&lt;script&gt;") == 60
    assert "60 of 100 items" in page


def test_scores_report_and_pages(model_directory, benchmark_file, tmp_path, monkeypatch):
    predictor = make_predictor(model_directory, config=PredictConfig(), cache=None, trust_remote_code=True)
    monkeypatch.setattr(
        predictor,
        "answer",
        lambda batches: ((n, [RIGHT.get(q.item.id, "?") for q in batch], 1.0) for n, batch in enumerate(batches)),
    )
    benchmarks = load_benchmarks(benchmark_file)
    result = evaluate(predictor, benchmarks)
    write_evaluation(tmp_path / "out", result.report(), result, benchmarks, predictor)
    assert {task: round(score.score, 3) for task, score in result.scores.by_task.items()} == {
        "read": 0.333, "text": 0.333, "locate": 0.5, "compare": 1.0,
    }  # fmt: skip
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["overall"] == result.scores.overall
    assert report["by_benchmark"]["mixed"]["by_task"]["locate"] == {"score": 0.5, "num_items": 2}
    page = (tmp_path / "out" / "mixed.html").read_text()
    assert page.count("data:image/png;base64,") == 7
    assert page.count('<em class="wrong">') == 5
