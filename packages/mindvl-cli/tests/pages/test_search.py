# SPDX-License-Identifier: Apache-2.0
"""Plots are the same file for the same search."""

from mindvl_cli.pages.search import draw_box_plot, draw_heat_map
from mindvl_merge.evaluation import CellScore, ResolutionSearch


def test_a_search_with_one_task_and_missing_cells_can_be_drawn(tmp_path):
    cells = tuple(
        CellScore(min_pixels=low * 784, max_pixels=high * 784, score=low / high, by_task={"read": low / high})
        for low, high in ((4, 8), (4, 16), (16, 16))
    )
    result = ResolutionSearch(cells=cells, chosen=cells[2], num_requests=3, num_evaluations=3)
    for draw in (draw_heat_map, draw_box_plot):
        first, second = tmp_path / "a", tmp_path / "b"
        first.mkdir(exist_ok=True)
        second.mkdir(exist_ok=True)
        for left, right in zip(draw(result, first), draw(result, second), strict=True):
            if left.suffix == ".png":
                assert left.read_bytes() == right.read_bytes()
