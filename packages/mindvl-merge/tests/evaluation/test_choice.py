# SPDX-License-Identifier: Apache-2.0
"""The choice among scored cells, the front of cost and score, the split of items, and intervals by hand."""

import numpy as np
import pytest

from mindvl_merge.evaluation import Box, CellScore, box_of, choose_cell, pareto_front
from mindvl_merge.evaluation.choice import holdout, split_items


def _cell(low, high, score, tokens=0.0, **by_task):
    return CellScore(min_pixels=low, max_pixels=high, score=score, by_task=by_task, visual_tokens=tokens)


def test_of_equal_scores_the_cheapest_is_chosen():
    cells = [_cell(4, 64, 0.9), _cell(16, 32, 0.9), _cell(4, 32, 0.9), _cell(4, 16, 0.8)]
    assert choose_cell(cells) is cells[2]
    cells = [_cell(4, 32, 0.9, tokens=20), _cell(4, 64, 0.9, tokens=10)]
    assert choose_cell(cells) is cells[1]  # fewer tokens before smaller limits


def test_a_task_is_chosen_for_by_its_own_score():
    cells = [_cell(1, 2, 0.5, a=0.9, b=0.1), _cell(1, 3, 0.6, a=0.5, b=0.7)]
    assert [choose_cell(cells, task=task) for task in ("a", "b")] == cells


def test_the_front_has_no_cell_that_another_one_beats():
    cells = [
        _cell(1, n, score, tokens) for n, (score, tokens) in enumerate([(0.5, 10), (0.4, 20), (0.7, 30), (0.7, 40)])
    ]
    assert pareto_front(cells) == [cells[0], cells[2]]


def test_every_task_is_split_and_keeps_an_item_for_the_choice():
    tasks = ["a"] * 10 + ["b"] * 4 + ["c"]
    selected, reported = split_items(tasks, 0.5, seed=1)
    assert sorted(selected + reported) == list(range(15))
    assert [sum(tasks[i] == name for i in reported) for name in "abc"] == [5, 2, 0]
    assert split_items(tasks, 0.5, seed=1) == (selected, reported)
    assert split_items(tasks, 0.0, seed=1) == (list(range(15)), [])
    selected, _ = split_items(tasks, 0.9, seed=1)
    assert [sum(tasks[i] == name for i in selected) for name in "abc"] == [1, 1, 1]


def test_the_interval_of_a_mean_is_that_of_its_standard_error():
    scores = np.random.default_rng(0).random(400)
    cell = _cell(1, 2, 0.5, all=0.5)
    found = holdout(cell, {"all": cell}, {id(cell): scores}, ["all"] * 400, seed=0).chosen
    error = 1.96 * scores.std() / 20
    assert found.mean == pytest.approx(scores.mean())
    assert (found.mean - found.low, found.high - found.mean) == pytest.approx((error, error), rel=0.1)


def test_quartiles_by_hand():
    assert box_of([5, 1, 2, 3, 4]) == Box(minimum=1, lower_quartile=2, median=3, upper_quartile=4, maximum=5)
