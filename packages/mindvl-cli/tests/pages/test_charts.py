# SPDX-License-Identifier: Apache-2.0
"""Tests of the charts: valid SVG, values at the right place, the chosen cell framed."""

import xml.etree.ElementTree as ElementTree

import pytest

from mindvl_cli.pages.charts import (
    box_plots,
    heat_map,
    histogram,
    legend,
    line_chart,
    lines_chart,
    paired_bars,
    quartiles,
    shaded_grid,
    stacked_areas,
)


def _points(svg: str, kind: str) -> list[tuple[float, float]]:
    line = next(node for node in ElementTree.fromstring(svg).iter("polyline") if node.get("class") == kind)
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in line.attrib["points"].split())]


def test_a_falling_loss_goes_down_the_page() -> None:
    points = _points(line_chart([(1, 3.0), (2, 2.0), (3, 1.0)], x_label="step", describe="loss"), "raw")

    assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert [y for _, y in points] == sorted(y for _, y in points)


def test_a_long_curve_is_thinned_but_keeps_both_ends() -> None:
    svg = line_chart([(float(x), 1.0 + x) for x in range(10_000)], x_label="step", describe="loss")
    points = _points(svg, "raw")

    assert len(points) == 400
    assert points[0][0] == pytest.approx(40.0)
    assert points[-1][0] == pytest.approx(310.0)


@pytest.mark.parametrize("points", [[(1.0, 0.0)], [(0.0, 2.0)], [(5.0, 1e-9), (6.0, 1e-9)]])
def test_a_curve_of_one_or_equal_points_is_drawn(points: list[tuple[float, float]]) -> None:
    ElementTree.fromstring(line_chart(points, x_label="step", describe="loss"))


def test_curves_share_one_scale_and_empty_ones_keep_their_tone() -> None:
    svg = lines_chart([("a", [(1, 2.0), (2, 2.0)]), ("b", []), ("c", [(1, 1.0)])], x_label="step", describe="loss")
    curves = {node.get("class"): node.attrib["points"] for node in ElementTree.fromstring(svg).iter("polyline")}
    assert list(curves) == ["series t0", "series t2"]
    heights = [float(points.split(",")[1].split()[0]) for points in curves.values()]
    assert heights[0] < heights[1]  # higher values stand higher on the page
    assert legend(["a", "b<"]) == '<ul class="key"><li class="t0">a</li><li class="t1">b&lt;</li></ul>'


@pytest.mark.parametrize("count", [1, 2, 1000])
def test_areas_lie_on_each_other_without_a_gap(count: int) -> None:
    xs = [float(step) for step in range(1, count + 1)]
    svg = stacked_areas(xs, [("a", [1.0] * count), ("b", [3.0] * count)], x_label="step", describe="time")
    lower, upper = (
        [tuple(map(float, corner.split(","))) for corner in node.attrib["points"].split()]
        for node in ElementTree.fromstring(svg).iter("polygon")
    )
    half = len(lower) // 2
    assert lower[:half] == upper[half:][::-1]
    assert lower[half][1] > lower[0][1] > upper[0][1]  # from the axis up
    assert 4 <= len(lower) <= 800


def test_a_shaded_grid_is_white_at_its_lowest_value_and_tells_each_one() -> None:
    svg = shaded_grid(
        ["3", "4"], ["10", "20"], [[1.0, 1.5], [2.0, 0.5]],
        low=1.0, row_title="layer", column_title="step", describe="load",
    )  # fmt: skip
    cells = [node for node in ElementTree.fromstring(svg).iter("rect")]
    assert [cell.attrib["style"] for cell in cells] == ["--heat:4%", "--heat:50%", "--heat:95%", "--heat:4%"]
    assert cells[2][0].text == "layer 4, 10: 2.00"


def test_quartiles_of_hand_worked_values() -> None:
    assert quartiles([1, 2, 3, 4, 5]) == (2, 3, 4)
    assert quartiles([0.5]) == (0.5, 0.5, 0.5)


def test_a_box_plot_shows_each_value_once() -> None:
    svg = box_plots([("A", [0.1, 0.2, 0.3], False), ("B", [0.9, 0.9], True)], describe="scores")

    assert svg.count('class="value"') == 5
    assert svg.count("boxplot stressed") == 1
    ElementTree.fromstring(svg)


def test_scores_that_are_all_equal_are_drawn() -> None:
    ElementTree.fromstring(box_plots([("A", [1.0, 1.0], False)], describe="scores"))
    ElementTree.fromstring(box_plots([("A", [0.0], False)], describe="scores"))


def test_a_heat_map_frames_the_chosen_cell_and_leaves_impossible_ones_blank() -> None:
    svg = heat_map(
        ["4", "16"],
        ["8", "32"],
        [[0.5, 0.75], [None, 1.0]],
        chosen=(1, 1),
        row_title="min",
        column_title="max",
        describe="scores",
    )

    cells = [node.attrib for node in ElementTree.fromstring(svg).iter("rect")]
    assert [cell["class"] for cell in cells] == ["cell", "cell", "void", "cell chosen"]
    assert cells[0]["style"] == "--heat:12%"
    assert cells[3]["style"] == "--heat:95%"


def test_a_histogram_draws_one_bar_for_each_filled_bin_and_the_limit() -> None:
    svg = histogram([0, 10, 20, 30], [4, 0, 2], x_label="tokens", describe="load", limit=40)
    root = ElementTree.fromstring(svg)
    bars = [node.attrib for node in root.iter("rect")]
    assert len(bars) == 2
    assert float(bars[0]["height"]) == pytest.approx(2 * float(bars[1]["height"]), rel=0.01)
    assert [node.get("class") for node in root.iter("line")].count("limit") == 1
    ElementTree.fromstring(histogram([0, 1], [0], x_label="nothing", describe="empty"))


def test_paired_bars_are_as_long_as_their_shares() -> None:
    root = ElementTree.fromstring(
        paired_bars([("a", 0.5, 0.25), ("b", 0.5, 0.75)], names=("asked", "got"), describe="")
    )
    widths = [float(node.attrib["width"]) for node in root.iter("rect")]
    assert widths[0] == widths[2] == pytest.approx(2 * widths[1], rel=0.01)
    assert widths[3] == pytest.approx(3 * widths[1], rel=0.01)
