# SPDX-License-Identifier: Apache-2.0
"""Halving chooses what scoring everything chooses, at a third of the evaluations."""

import numpy as np
import pytest

from mindvl_merge.evaluation import ResolutionGrid, search_resolution


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
