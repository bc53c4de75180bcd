# SPDX-License-Identifier: Apache-2.0
"""When annotations of two models are the same."""

import pytest

from mindvl_data.curation.agreement import Tolerance, iou, majority, normalized, number_of, same


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Cat!", "cat"),
        ("(B)", "b"),
        ("Answer: C.", "c"),
        ("\\boxed{\\text{yes}}", "yes"),
        ("$\\frac{1}{2}$", "1/2"),
        ("1,234 km", "1234 km"),
        ("\uff21\uff22", "ab"),  # full-width letters
        ("a", "a"),  # an option, not an article
    ],
)
def test_texts_are_normalized(text: str, expected: str) -> None:
    assert normalized(text) == expected


def test_numbers_are_read_with_separators_and_percent_signs() -> None:
    assert [number_of(text) for text in ("1,200", "$3.5$", "50%", "-2e3", "2 km", "")] == [
        1200,
        3.5,
        0.5,
        -2000,
        None,
        None,
    ]


def test_the_overlap_of_boxes_is_intersection_over_union() -> None:
    assert iou([0, 0, 10, 10], [5, 0, 15, 10]) == pytest.approx(50 / 150)
    assert iou([0, 0, 10, 10], [20, 0, 30, 10]) == 0
    assert iou([0, 0, 0, 0], [0, 0, 0, 0]) == 0


def test_answers_agree_after_normalization_and_within_the_tolerances() -> None:
    tolerance = Tolerance(min_iou=0.5, max_distance=5)
    assert same("1,200", 1200, tolerance)
    assert same("0.3333", "0.33333", tolerance)
    assert not same("12", "13", tolerance)
    assert same([0, 0, 10, 10], [0, 0, 10, 6], tolerance)
    assert not same([0, 0, 10, 10], [0, 0, 10, 4], tolerance)
    assert same({"action": "Click", "point": [3, 4]}, {"action": "click", "point": [0, 0]}, tolerance)
    assert not same({"action": "click", "point": [3, 5]}, {"action": "click", "point": [0, 0]}, tolerance)
    assert not same({"action": "click"}, {"action": "click", "point": [0, 0]}, tolerance)
    assert not same(True, 1, tolerance)
    assert same(["a", "b"], ["A", "B."], tolerance)


def test_the_largest_group_decides_and_boxes_become_their_median() -> None:
    tolerance = Tolerance()
    assert majority(["cat", "dog", "Cat."], tolerance) == ([0, 2], "cat")
    assert majority(["cat", "dog"], tolerance) == ([0], "cat")
    boxes = [[0, 0, 10, 10], [0, 0, 12, 10], [50, 50, 60, 60], [0, 0, 11, 9]]
    assert majority(boxes, tolerance) == ([0, 1, 3], [0, 0, 11, 10])
    actions = [{"action": "tap", "point": [10, 10]}, {"action": "tap", "point": [14, 12]}]
    assert majority(actions, tolerance) == ([0, 1], {"action": "tap", "point": [12, 11]})
