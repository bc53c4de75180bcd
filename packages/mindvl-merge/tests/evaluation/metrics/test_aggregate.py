# SPDX-License-Identifier: Apache-2.0
"""Benchmark scores by hand: MME's sums, circular questions, HallusionBench's three accuracies, counts and means."""

import pytest

from mindvl_merge.errors import EvaluationError
from mindvl_merge.evaluation import aggregate
from mindvl_merge.evaluation.metrics.aggregate import MME_COGNITION, MME_PERCEPTION


def _mme(category, image, score):
    return {"category": category, "image": image, "score": score}


def test_mme_adds_accuracy_and_accuracy_plus():
    # image 1 both right, image 2 one of two: accuracy 75, accuracy+ 50
    records = [_mme("count", 1, 1.0), _mme("count", 1, 1.0), _mme("count", 2, 1.0), _mme("count", 2, 0.0)]
    records += [_mme("code_reasoning", 3, 1.0), _mme("code_reasoning", 3, 1.0)]
    result = aggregate("MME", records)
    assert (result["count accuracy"], result["count accuracy+"], result["count"]) == (75, 50, 125)
    assert (result["perception"], result["cognition"], result["score"]) == (125, 200, 325)
    assert result["overall"] == pytest.approx(325 / 28)


def test_everything_right_is_2800_points_or_100():
    records = [_mme(name, 0, 1.0) for name in MME_PERCEPTION + MME_COGNITION for _ in range(2)]
    result = aggregate("mme", records)
    assert (result["perception"], result["cognition"], result["overall"]) == (2000, 800, 100)


def test_an_image_of_mme_without_its_pair_is_named():
    with pytest.raises(EvaluationError, match=r"image 7 of category 'count' has 1 questions, 2 are needed"):
        aggregate("mme", [_mme("count", 7, 1.0)])


def test_a_circular_question_is_right_if_all_rotations_are():
    records = [
        {"index": index, "score": score, "category": "logic", "l2-category": "reasoning"}
        for index, score in ((1, 1.0), (1000001, 1.0), (2, 1.0), (1000002, 0.0), (3, 0.0))
    ]
    result = aggregate("MMBench_DEV_EN", records)
    assert result["overall"] == pytest.approx(100 / 3)
    assert result["single"] == 60
    assert result["logic"] == result["reasoning"] == pytest.approx(100 / 3)


def test_rotations_without_their_question_are_named():
    with pytest.raises(EvaluationError, match="question 4 has rotations but no main entry"):
        aggregate("mmbench", [{"index": 1000004, "score": 1.0}])


def test_hallusionbench_groups_by_figure_and_by_question():
    # index: category, subcategory, visual input, set, figure, question
    scores = {"VS_chart_0_1_0_0": 1.0, "VS_chart_1_1_1_0": 1.0, "VS_chart_1_1_1_1": 0.0, "VD_math_1_1_1_0": 1.0}
    records = [{"index": key, "l2-category": key[3:8].strip("_"), "score": score} for key, score in scores.items()]
    result = aggregate("HallusionBench", records)
    assert result["aAcc"] == 75
    assert result["fAcc"] == pytest.approx(200 / 3)  # figures chart 0, chart 1 (one wrong), math 1
    assert result["qAcc"] == pytest.approx(200 / 3)  # questions chart 0 (twice), chart 1, math 0
    assert result["overall"] == pytest.approx((75 + 200 / 3 + 200 / 3) / 3)
    # lmms-eval leaves out questions of VS without a figure
    assert aggregate("HallusionBench", records, "lmms-eval")["fAcc"] == 50


def test_ocrbench_counts_right_answers_by_category():
    records = [
        {"category": "Regular Text Recognition", "score": 1.0},
        {"category": "Digit String Recognition", "score": 1.0},
        {"category": "Doc-oriented VQA", "score": 0.0},
    ]
    result = aggregate("OCRBench", records)
    assert (result["Text Recognition"], result["Final Score"], result["overall"]) == (2, 2, 0.2)
    assert aggregate("ocrbench", records, "strict")["overall"] == pytest.approx(200 / 3)


def test_skills_and_capabilities_count_an_item_several_times():
    records = [
        {"score": 1.0, "task": "geometry", "skills": "['algebra', 'numeric']"},
        {"score": 0.0, "task": "geometry", "skills": ["numeric"]},
    ]
    assert aggregate("MathVista_MINI", records) == {"overall": 50, "algebra": 100, "numeric": 50, "geometry": 50}
    vet = [{"score": 0.5, "category": "rec,ocr"}, {"score": 1.0, "category": "ocr"}]
    assert aggregate("MMVet", vet) == {"overall": 75, "rec": 50, "ocr": 75}


def test_other_benchmarks_are_means_by_split_and_category():
    records = [{"score": 1.0, "split": "human"}, {"score": 0.0, "split": "human"}, {"score": 1.0, "split": "augmented"}]
    result = aggregate("ChartQA_TEST", records)
    assert result == {"overall": pytest.approx(200 / 3), "human": 50, "augmented": 100}


def test_nothing_to_aggregate_is_an_error():
    with pytest.raises(EvaluationError, match="there is no score to aggregate"):
        aggregate("docvqa", [])
    with pytest.raises(EvaluationError, match="a record has no 'category'"):
        aggregate("ocrbench", [{"score": 1.0}])


def test_simpleqa_has_the_f_score_of_all_and_of_attempted_answers():
    records = [
        {"score": score, "attempted": tried}
        for score, tried in ((1, True), (1, True), (0, True), (0, False), (0, False))
    ]
    assert aggregate("simpleqa", records) == {
        "overall": 40.0, "correct": 40.0, "incorrect": pytest.approx(20.0), "not attempted": 40.0,
        "correct given attempted": pytest.approx(200 / 3), "F-score": pytest.approx(50.0),
    }  # fmt: skip
    assert aggregate("c_simpleqa", [{"score": 0, "attempted": False}])["F-score"] == 0.0


def test_arena_hard_counts_games_by_their_weights():
    found = aggregate("arena_hard", [{"score": 1.0, "weight": 6}, {"score": 0.0, "weight": 2}])
    assert found["overall"] == 75.0
    assert (found["low"], found["high"]) == (0.0, 100.0)
    assert aggregate("arena_hard", [{"score": 0.5}] * 3) == {"overall": 50.0, "low": 50.0, "high": 50.0}
