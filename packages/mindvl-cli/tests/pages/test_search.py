# SPDX-License-Identifier: Apache-2.0
"""Plots are the same file for the same search."""

import pytest

from mindvl_cli.pages.search import draw_box_plot, draw_heat_map, write_page
from mindvl_merge.evaluation import CellScore, Holdout, Interval, ResolutionSearch


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


@pytest.mark.slow
def test_the_page_compares_models_and_escapes_their_names(tmp_path):
    interval = Interval(mean=0.5, low=0.4, high=0.6)
    report = Holdout(num_items=9, chosen=interval, per_task=interval, gain=interval, by_task={"read": interval})
    cells = tuple(
        CellScore(
            min_pixels=4 * 784, max_pixels=high * 784, score=0.5, by_task={"read": 0.4, "find": 0.6}, visual_tokens=high,
            num_items=items, seconds=high / 100,
        )
        for high, items in ((8, 20), (16, 20), (32, 5))
    )  # fmt: skip
    result = ResolutionSearch(
        cells=cells, chosen=cells[0], num_requests=60, num_evaluations=30, chosen_by_task={"read": cells[0], "find": cells[1]},
        num_distinct={"read": 2, "find": 3}, holdout=report,
    )  # fmt: skip
    page = write_page({"a/<one>": result, "b/two": result}, tmp_path / "page.html").read_text()
    assert "&lt;one&gt;" in page
    assert "<one>" not in page
    for text in (
        "40.0 to 60.0",
        "30 of 60",
        "read: 2 distinct of 3",
        "Models compared",
        "Score against visual tokens",
        "Score against time",
    ):
        assert text in page
