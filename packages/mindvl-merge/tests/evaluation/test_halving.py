# SPDX-License-Identifier: Apache-2.0
"""Halving chooses what scoring everything chooses, at a third of the evaluations."""

import numpy as np
import pytest

from mindvl_merge.evaluation import ResolutionGrid, search, search_resolution
from mindvl_merge.evaluation.halving import _is_behind


class Peaked:
    """The probability of a right answer depends on the limits; an item is right or wrong for good."""

    def __init__(self, seed, best=(16, 2560)):
        self.seed, self.best = seed, best

    def resized(self, item, min_pixels, max_pixels):
        return min_pixels, max_pixels

    def score(self, requests):
        return [float(self._chance(r) > np.random.default_rng([self.seed, r.item]).random()) for r in requests]

    def _chance(self, request):
        low, high = request.min_pixels / 784, request.max_pixels / 784
        return 0.8 - 0.08 * abs(np.log2(low / self.best[0])) - 0.1 * abs(np.log2(high / self.best[1]))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_the_same_cell_is_found_with_a_third_of_the_evaluations(seed):
    items = list(range(400))
    tasks = ["abc"[item % 3] for item in items]
    whole = search_resolution(Peaked(seed), items, ResolutionGrid.paper(), tasks=tasks)
    found = search_resolution(Peaked(seed), items, ResolutionGrid.paper(), tasks=tasks, halving=True, seed=seed)
    assert whole.num_evaluations == 24 * 400
    assert found.num_evaluations <= whole.num_evaluations / 3
    chosen = [(one.chosen.min_pixels, one.chosen.max_pixels) for one in (whole, found)]
    assert chosen[0] == chosen[1]
    assert found.chosen.score == pytest.approx(whole.chosen.score)


def test_cells_with_equal_inputs_count_once():
    class Clamped(Peaked):
        def resized(self, item, min_pixels, max_pixels):
            return min(max(1000 * 784, min_pixels), max_pixels)  # inside of every pair of limits

    found = search_resolution(Clamped(0), list(range(50)), ResolutionGrid.paper(), halving=True)
    assert found.num_evaluations == 50
    assert {cell.num_items for cell in found.cells} == {50}


def test_one_item_and_one_cell_are_enough():
    grid = ResolutionGrid(min_units=(4,), max_units=(8,))
    found = search_resolution(Peaked(0), [1], grid, halving=True)
    assert (found.num_evaluations, found.chosen) == (1, found.cells[0])


class Fixed(Peaked):
    """Every cell has one score for all items, by the largest image of the cell."""

    def __init__(self, scores):
        self.scores = scores

    def score(self, requests):
        return [self.scores[request.max_pixels] for request in requests]


def test_half_of_the_cells_are_stopped_after_a_round_and_all_that_are_behind_once_there_are_sixteen_items():
    scores = dict(zip(range(1, 10), (0.9, 0.89, 0.88, 0.87, 0.86, 0.2, 0.1, 0.05, 0.0), strict=True))
    grid = ResolutionGrid(min_units=(1,), max_units=tuple(scores), unit_pixels=1)
    found = search_resolution(Fixed(scores), list(range(64)), grid, halving=True)
    # Rounds of 8, 16, 32 and 64 items: five of nine cells stay after the first; then the scores have no deviation.
    assert [cell.num_items for cell in found.cells] == [64, 16, 16, 16, 16, 8, 8, 8, 8]


def test_a_cell_is_behind_by_three_standard_errors():
    # The deviation of 16 values around -1 in pairs at a distance of d is d * sqrt(16 / 15), and its error a fourth of it.
    pairs = {d: np.array([-1 - d, -1 + d] * 8) for d in (1.28, 1.31)}
    assert _is_behind(pairs[1.28])  # -1 + 3 / 4 * 1.322 is below 0
    assert not _is_behind(pairs[1.31])  # -1 + 3 / 4 * 1.353 is not
    assert not _is_behind(pairs[1.28][:14])
    assert not _is_behind(-pairs[1.28])


def test_a_cell_that_was_stopped_early_is_not_chosen(monkeypatch):
    monkeypatch.setattr(search, "halved", lambda *_, **__: {0: ([0], np.ones(1)), 1: ([0, 1], np.full(2, 0.9))})
    grid = ResolutionGrid(min_units=(1,), max_units=(1, 2), unit_pixels=1)
    found = search_resolution(Fixed({}), [1, 2], grid, halving=True)
    assert (found.chosen, found.chosen_by_task["all"]) == (found.cells[1], found.cells[1])
