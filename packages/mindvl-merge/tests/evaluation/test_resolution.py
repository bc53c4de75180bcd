# SPDX-License-Identifier: Apache-2.0
"""Grids: the paper's, scaled ones, and refusals."""

import pytest

from mindvl_merge import MergeConfigError
from mindvl_merge.evaluation import ResolutionGrid


def test_the_paper_has_24_cells():
    cells = ResolutionGrid.parse("paper").cells()
    assert len(cells) == 24
    assert (cells[0].min_pixels, cells[0].max_pixels) == (4 * 784, 1280 * 784)
    assert (cells[-1].min_pixels, cells[-1].max_pixels) == (64 * 784, 8192 * 784)


def test_a_scaled_grid_leaves_out_pairs_that_cross():
    cells = ResolutionGrid.parse("4,16x8,16").cells()
    assert [(cell.min_pixels // 784, cell.max_pixels // 784) for cell in cells] == [(4, 8), (4, 16), (16, 16)]


@pytest.mark.parametrize("text", ["", "4,16", "4x", "ax4", "4x8x9", "0x4", "4,4x8", "16x8"])
def test_text_that_is_no_grid_is_refused(text):
    with pytest.raises(MergeConfigError):
        ResolutionGrid.parse(text)


def test_a_grid_follows_the_visual_token_of_the_model_unless_it_has_a_unit():
    cell = ResolutionGrid.parse("4x64").for_model(32).cells()[0]
    assert (cell.min_pixels, cell.max_pixels) == (4 * 1024, 64 * 1024)
    given = ResolutionGrid(min_units=(4,), max_units=(64,), unit_pixels=100)
    assert given.for_model(32) == given
