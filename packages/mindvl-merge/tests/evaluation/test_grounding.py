# SPDX-License-Identifier: Apache-2.0
"""Scores by hand: text, points and boxes moved back from the resized image, means by task."""

import pytest

from mindvl_merge.evaluation.benchmark import Item
from mindvl_merge.evaluation.grounding import find_points, gather, overlap, score_answer


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
    assert score_answer(_item("point"), answer, original=(100, 100), unit=(100, 200)) == score


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("(20,20),(60,60)", 1),
        ("(20,20),(60,41)", 1),
        ("(20,20),(60,40)", 1),
        ("(20,20),(60,39)", 0),
        ("(60,60),(20,20)", 0),
        ("(20,20)", 0),
    ],
)
def test_a_box_needs_half_of_the_union(answer, score):
    assert score_answer(_item("box"), answer, original=(100, 100), unit=(200, 200)) == score


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ('```json\n[{"bbox_2d": [200, 200, 600, 600], "label": "cat"}]\n```', 1),
        ("[200, 200, 600, 390]", 0),
        ("(200,200),(600,600) not [1, 2]", 1),
        ('{"point_2d": [200, 200]}', 0),
        ("[[200, 200, 600, 600], [200, 200, 600, 600]]", 0),
    ],
)
def test_lists_are_read_as_boxes_and_points_in_thousandths(answer, score):
    assert score_answer(_item("box"), answer, original=(50, 50), unit=(1000, 1000)) == score


def test_a_point_in_a_list_is_read():
    answer = '{"point_2d": [200, 100], "label": "cat"}'
    assert find_points(answer, original=(50, 100), unit=(1000, 1000)) == [(20, 5)]


def test_overlap_by_hand():
    assert overlap((0, 0, 2, 2), (1, 1, 3, 3)) == pytest.approx(1 / 7)
    assert overlap((0, 0, 2, 2), (2, 0, 3, 3)) == 0


def test_overall_is_the_mean_of_tasks_not_of_items():
    items = [_item(task="a"), _item(task="a"), _item(task="a"), _item(task="b")]
    scores = gather(items, [1.0, 1.0, 1.0, 0.0])
    assert (scores.overall, scores.by_task["a"].num_items) == (0.5, 3)
