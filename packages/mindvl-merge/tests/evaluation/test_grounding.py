# SPDX-License-Identifier: Apache-2.0
"""Scores by hand: text, points and boxes moved back from the resized image, means by task."""

import pytest

from mindvl_merge.evaluation.benchmark import Item
from mindvl_merge.evaluation.grounding import gather, overlap, score_answer


def _item(score="exact", task="t", answer="4 071", box=(10.0, 10.0, 30.0, 30.0)):
    return Item(id="i", task=task, images=(), question="q", answer=answer, score=score, box=box)


@pytest.mark.parametrize(("answer", "score"), [("4 071", 1), (" 4  071\n", 1), ("4071", 0), ("", 0)])
def test_exact_ignores_only_the_kind_of_blanks(answer, score):
    assert score_answer(_item(), answer) == score


@pytest.mark.parametrize(
    ("answer", "score"),
    [("(40,20)", 1), ("(20, 10)", 1), ("(61,20)", 0), ("(20,20) or (40,20)", 0), ("there", 0), ("(20,-20)", 0)],
)
def test_a_point_is_moved_back_before_it_is_compared(answer, score):
    # the image was made twice as wide and kept its height: (40, 20) is (20, 20)
    assert score_answer(_item("point"), answer, original=(100, 100), resized=(100, 200)) == score


@pytest.mark.parametrize(
    ("answer", "score"),
    [("(20,20),(60,60)", 1), ("(20,20),(60,41)", 1), ("(20,20),(60,39)", 0), ("(60,60),(20,20)", 0), ("(20,20)", 0)],
)
def test_a_box_needs_half_of_the_union(answer, score):
    assert score_answer(_item("box"), answer, original=(100, 100), resized=(200, 200)) == score


def test_overlap_by_hand():
    assert overlap((0, 0, 2, 2), (1, 1, 3, 3)) == pytest.approx(1 / 7)
    assert overlap((0, 0, 2, 2), (2, 0, 3, 3)) == 0


def test_overall_is_the_mean_of_tasks_not_of_items():
    items = [_item(task="a"), _item(task="a"), _item(task="a"), _item(task="b")]
    scores = gather(items, [1.0, 1.0, 1.0, 0.0])
    assert (scores.overall, scores.by_task["a"].num_items) == (0.5, 3)
