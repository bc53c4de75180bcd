# SPDX-License-Identifier: Apache-2.0
"""The search equals scoring everything, at a fraction of the work, and chooses the cheapest of the best."""

from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindvl_merge import MergeError
from mindvl_merge.evaluation import ResolutionGrid, box_of, pareto_front, scores_over_grid, search_resolution


class ClampScorer:
    """Items are pixel counts; the model sees the count clamped to the limits and scores by a made-up rule of it."""

    def __init__(self):
        self.seen = []

    def resized(self, item, min_pixels, max_pixels):
        return min(max(item, min_pixels), max_pixels)

    def score(self, requests):
        self.seen = [(r.item, self.resized(r.item, r.min_pixels, r.max_pixels)) for r in requests]
        return [(item * 31 + size * 17) % 101 / 100 for item, size in self.seen]


units = st.lists(st.integers(1, 60), min_size=1, max_size=4, unique=True).map(tuple)


@settings(max_examples=80)
@given(low=units, high=units, items=st.lists(st.integers(1, 80), min_size=1, max_size=20), seed=st.integers(0, 3))
def test_equal_to_scoring_every_cell(low, high, items, seed):
    if min(low) > max(high):
        return
    grid = ResolutionGrid(min_units=low, max_units=high, unit_pixels=1)
    tasks = ["abcd"[(i * (seed + 1)) % 3] for i in range(len(items))]
    scorer = ClampScorer()
    result = search_resolution(scorer, items, grid, tasks=tasks)
    assert len(set(enumerate(scorer.seen))) == len(scorer.seen) == result.num_evaluations
    for cell, scored in zip(grid.cells(), result.cells, strict=True):
        sizes = [scorer.resized(item, cell.min_pixels, cell.max_pixels) for item in items]
        scores = [(item * 31 + size * 17) % 101 / 100 for item, size in zip(items, sizes, strict=True)]
        by_task = {t: fmean(s for s, name in zip(scores, tasks, strict=True) if name == t) for t in set(tasks)}
        assert scored.by_task == pytest.approx(by_task)
        assert scored.score == pytest.approx(fmean(by_task.values()))
    assert result.chosen.score == max(cell.score for cell in result.cells)


def test_equal_resizes_are_evaluated_once():
    grid = ResolutionGrid(min_units=(4, 16), max_units=(100, 200, 300), unit_pixels=1)
    result = search_resolution(ClampScorer(), [50, 2, 250], grid)
    # 50: one size; 2: two (4, 16); 250: three (100, 200, 250)
    assert (result.num_requests, result.num_evaluations, result.num_saved) == (18, 6, 12)


class TokenScorer(ClampScorer):
    def num_visual_tokens(self, item, min_pixels, max_pixels):
        return self.resized(item, min_pixels, max_pixels)


def test_visual_tokens_are_those_of_the_resized_items():
    grid = ResolutionGrid(min_units=(4,), max_units=(100, 200), unit_pixels=1)
    result = search_resolution(TokenScorer(), [50, 2, 250], grid)
    assert [cell.visual_tokens for cell in result.cells] == [(50 + 4 + 100) / 3, (50 + 4 + 200) / 3]


def test_the_time_of_a_cell_is_the_mean_of_its_answers_and_gives_a_second_front():
    class Timed(ClampScorer):
        """Answers take a second for each ten pixels; images above 100 pixels gain nothing."""

        def score_timed(self, requests):
            sizes = [self.resized(r.item, r.min_pixels, r.max_pixels) for r in requests]
            return [(min(size, 100) / 100, size / 10) for size in sizes]

    grid = ResolutionGrid(min_units=(1,), max_units=(50, 100, 200), unit_pixels=1)
    result = search_resolution(Timed(), [50, 250], grid)
    assert [cell.seconds for cell in result.cells] == [5.0, 7.5, 12.5]
    assert [cell.max_pixels for cell in pareto_front(result.cells, "seconds")] == [50, 100]
    assert scores_over_grid(result.cells) == {"all": [0.5, 0.75, 0.75]}
    untimed = search_resolution(ClampScorer(), [50], grid)
    assert untimed.cells[0].seconds is None
    assert pareto_front(untimed.cells, "seconds") == []


def test_each_task_has_its_own_choice_and_number_of_distinct_cells():
    class Best(ClampScorer):
        """Small items are best at 10, large ones as large as possible."""

        def score(self, requests):
            sizes = [(r.item, self.resized(r.item, r.min_pixels, r.max_pixels)) for r in requests]
            return [1 - abs(size - 10) / 100 if item < 20 else size / 100 for item, size in sizes]

    grid = ResolutionGrid(min_units=(5, 10, 15), max_units=(50, 90), unit_pixels=1)
    result = search_resolution(Best(), [3, 4, 60, 80], grid, tasks=["a", "a", "b", "b"])
    chosen = {task: (cell.min_pixels, cell.max_pixels) for task, cell in result.chosen_by_task.items()}
    assert (chosen["a"][0], chosen["b"][1]) == (10, 90)
    assert (result.chosen.min_pixels, result.chosen.max_pixels) == (10, 90)
    assert result.num_distinct == {"a": 3, "b": 2}  # by the minimum; by the maximum


def test_the_choice_is_reported_on_items_that_took_no_part_in_it():
    generator = np.random.default_rng(0)
    items = [int(one) for one in generator.integers(1, 300, 200)]

    class Noisy(ClampScorer):
        def score(self, requests):
            return [float(r.max_pixels == 200 or generator.random() < 0.5) for r in requests]

    grid = ResolutionGrid(min_units=(1,), max_units=(100, 200), unit_pixels=1)
    result = search_resolution(Noisy(), items, grid, report_share=0.5)
    assert result.holdout is not None
    assert result.holdout.num_items == 100
    assert {cell.num_items for cell in result.cells} == {100}
    found = result.holdout.chosen
    assert 0 <= found.low <= found.mean <= found.high <= 1
    assert (result.holdout.gain.mean, result.holdout.gain.high) == (0, 0)  # one task: its own cell is the common one
    assert result.num_evaluations <= 200


def test_wrong_calls_are_refused():
    grid = ResolutionGrid(min_units=(1,), max_units=(2,))
    with pytest.raises(MergeError, match="no item"):
        search_resolution(ClampScorer(), [], grid)
    with pytest.raises(MergeError, match="1 tasks for 2 items"):
        search_resolution(ClampScorer(), [1, 2], grid, tasks=["a"])
    with pytest.raises(MergeError, match=r"report_share: must be at least 0 and below 1, got 1\.0"):
        search_resolution(ClampScorer(), [1, 2], grid, report_share=1.0)
    with pytest.raises(MergeError, match="no score"):
        box_of([])
