# SPDX-License-Identifier: Apache-2.0
"""An evaluation is the mean over tasks, and a search scores every cell with the same predictor."""

import pytest

from mindvl_merge.errors import EvaluationError
from mindvl_merge.evaluation import Benchmark, Item, Prediction, ResolutionGrid, evaluate, search_model
from mindvl_merge.evaluation.predictions import Question


class WidthPredictor:
    """Answers with the maximum number of visual tokens."""

    multiple = 28

    def questions(self, items, *, min_pixels, max_pixels):
        return [Question(item=i, min_pixels=min_pixels or 784, max_pixels=max_pixels or 3 * 784) for i in items]

    def sizes(self, item, min_pixels, max_pixels):
        return ((28, max_pixels // 28),)

    def predict(self, questions, *, progress=None):
        return [
            Prediction(item=q.item, answer=str(q.max_pixels // 784), original=((28, 28),), resized=((28, 28),))
            for q in questions
        ]


def _item(name, task, answer):
    return Item(id=name, task=task, images=(), question="?", answer=answer)


def test_the_overall_score_is_the_mean_over_tasks():
    first = Benchmark(name="one", items=(_item("1", "a", "3"), _item("2", "a", "4"), _item("3", "b", "3")))
    second = Benchmark(name="two", items=(_item("4", "b", "5"),))
    result = evaluate(WidthPredictor(), [first, second])
    assert {task: score.score for task, score in result.scores.by_task.items()} == {"a": 0.5, "b": 0.5}
    assert (result.by_benchmark["one"].overall, result.by_benchmark["two"].overall) == (0.75, 0.0)
    assert result.item_scores == (1.0, 0.0, 1.0, 0.0)


def test_a_search_finds_the_cell_that_answers_right():
    items = [_item("1", "a", "5"), _item("2", "b", "5")]
    result = search_model(WidthPredictor(), items, ResolutionGrid(min_units=(1,), max_units=(3, 5, 7)))
    assert (result.chosen.max_pixels, result.chosen.score) == (5 * 784, 1.0)


def test_a_benchmark_whose_groups_are_missing_is_refused_before_a_question_is_asked():
    item = Item(id="1", task="t", images=(), question="?", answer="Yes", metric="yes_no", fields={"category": "count"})
    benchmark = Benchmark(name="MME", items=(item,), kind="MME")
    predictor = WidthPredictor()
    predictor.predict = lambda questions, progress=None: pytest.fail("asked")
    with pytest.raises(EvaluationError, match="mme: a record has no 'image'"):
        evaluate(predictor, [benchmark])


def test_a_benchmark_of_a_known_kind_is_one_task():
    items = tuple(
        Item(id=str(number), task="t", images=(), question="?", answer="", metric="anls", references=["3", "x"])
        for number in range(2)
    )
    result = evaluate(WidthPredictor(), [Benchmark(name="DocVQA", items=items, kind="docvqa")])
    assert result.metrics == {"DocVQA": {"overall": 100.0}}
    assert result.scores.by_task["DocVQA"].score == 1.0


def test_judgements_are_kept_with_the_scores_and_failed_ones_are_counted():
    items = tuple(
        Item(id=str(number), task="t", images=(), question=f"q{number}", answer="3", metric="simpleqa", references="3")
        for number in range(4)
    )
    replies = {"q0": "A", "q1": "C", "q2": "nonsense", "q3": "B"}

    def judge(prompt):
        return next(reply for question, reply in replies.items() if f"Question: {question}" in prompt)

    result = evaluate(
        WidthPredictor(), [Benchmark(name="facts", items=items, kind="simpleqa")], judge=judge, num_judge_workers=3
    )
    assert result.item_scores == (1.0, 0.0, 0.0, 0.0)
    assert result.report()["failed_judgements"] == {"facts": 1}
    assert [one.judgements[0].reply for one in result.judged] == ["A", "C", "nonsense", "B"]
    assert "Answer: 3" in result.judged[0].judgements[0].prompt
    assert result.metrics["facts"]["not attempted"] == 25.0
    assert result.metrics["facts"]["F-score"] == pytest.approx(100 * 2 * 0.25 * (1 / 3) / (0.25 + 1 / 3))


def test_a_search_on_a_benchmark_with_a_judge_is_refused():
    item = Item(id="1", task="t", images=(), question="?", answer="a", metric="mmvet")
    with pytest.raises(EvaluationError, match="mmvet: the search cannot use a judge"):
        search_model(WidthPredictor(), [item], ResolutionGrid.paper())


def test_two_benchmarks_of_one_name_are_refused():
    benchmark = Benchmark(name="one", items=(_item("1", "a", "3"),))
    with pytest.raises(EvaluationError, match="two benchmarks have the name 'one'"):
        evaluate(WidthPredictor(), [benchmark, benchmark])
