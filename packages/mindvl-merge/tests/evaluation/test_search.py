# SPDX-License-Identifier: Apache-2.0
"""The search equals scoring everything, at a fraction of the work, and chooses the cheapest of the best."""

from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindvl_merge import MergeError
from mindvl_merge.evaluation import Box, CellScore, ResolutionGrid, box_of, choose_cell, search_resolution


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


def test_of_equal_scores_the_cheapest_is_chosen():
    cells = [
        CellScore(min_pixels=low, max_pixels=high, score=score, by_task={})
        for low, high, score in [(4, 64, 0.9), (16, 32, 0.9), (4, 32, 0.9), (4, 16, 0.8)]
    ]
    assert choose_cell(cells) is cells[2]


def test_quartiles_by_hand():
    assert box_of([5, 1, 2, 3, 4]) == Box(minimum=1, lower_quartile=2, median=3, upper_quartile=4, maximum=5)


def test_wrong_calls_are_refused():
    grid = ResolutionGrid(min_units=(1,), max_units=(2,))
    with pytest.raises(MergeError, match="no item"):
        search_resolution(ClampScorer(), [], grid)
    with pytest.raises(MergeError, match="1 tasks for 2 items"):
        search_resolution(ClampScorer(), [1, 2], grid, tasks=["a"])
    with pytest.raises(MergeError, match="no score"):
        box_of([])
