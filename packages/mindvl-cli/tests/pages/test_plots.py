# SPDX-License-Identifier: Apache-2.0
"""Plots: well-formed SVG, values at the right places, colours that follow the page, the same file in every run."""

import math
import re
import xml.etree.ElementTree as ElementTree

import pytest

from mindvl_cli.pages import plots
from mindvl_cli.pages.plots import Plot, areas, boxes, heat_map, histogram, line, lines, paired_bars


def _axes(plot: Plot) -> "plots.Any":
    return plot.figure.axes[0]


def _curve(plot: Plot, gid: str) -> tuple[list[float], list[float]]:
    (found,) = (curve for curve in _axes(plot).lines if curve.get_gid() == gid)
    return list(found.get_xdata()), list(found.get_ydata())


def test_a_plot_in_a_page_is_one_element_that_takes_its_colours_from_the_page() -> None:
    text = line([(1, 3.0), (2, 1.0)], x_label="<step>", describe='loss "a" <b>').__html__()
    root = ElementTree.fromstring(text)
    assert root.attrib["aria-label"] == 'loss "a" <b>'
    assert "&lt;step&gt;" in text
    assert "var(--accent)" in text
    assert not re.findall(r"#[0-9a-f]{6}", text)
    assert "http" not in text
    assert "url(" not in text


def test_every_colour_of_a_plot_is_one_of_the_stylesheet_in_light_and_in_dark_mode() -> None:
    light, dark = plots._colours()
    assert light.keys() == dark.keys()
    assert all(light[name] != dark[name] for name in ("ink", "soft", "line", "accent", "card"))


def test_a_file_of_its_own_has_dark_colours_and_is_the_same_in_every_run() -> None:
    first, second = (boxes([("A", [0.1, 0.4])], describe="scores").svg() for _ in range(2))
    assert first == second
    root = ElementTree.fromstring(first)
    assert root[0].text == "scores"
    assert "prefers-color-scheme: dark" in first


def test_a_long_curve_is_thinned_but_keeps_both_ends() -> None:
    xs, ys = _curve(line([(float(x), 1.0 + x) for x in range(10_000)], x_label="step", describe="loss"), "measured")
    assert len(xs) == 400
    assert (xs[0], xs[-1], ys[0], ys[-1]) == (0, 9_999, 1, 10_000)


@pytest.mark.parametrize("points", [[(1.0, 0.0)], [(0.0, 2.0)], [(5.0, 1e-9), (6.0, 1e-9)]])
def test_a_curve_of_one_or_equal_points_is_drawn(points: list[tuple[float, float]]) -> None:
    ElementTree.fromstring(line(points, x_label="step", describe="loss").__html__())


def test_a_loss_that_is_not_finite_leaves_a_gap_and_the_scale_as_it_is() -> None:
    plot = line([(1.0, 4.0), (2.0, math.nan), (3.0, math.inf), (4.0, 2.0)], x_label="step", describe="loss")
    assert _axes(plot).get_ylim() == pytest.approx((0, 4.32))
    ElementTree.fromstring(plot.__html__())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["$a$ $", r"\alpha_", "<b>&", "\u4e2d\u6587"])
def test_names_are_drawn_as_they_are(name: str) -> None:
    root = ElementTree.fromstring(boxes([(name, [0.5, 1.0])], describe="scores").__html__())
    assert name in [node.text for node in root.iter("text")]


def test_what_was_measured_is_drawn_and_a_moving_mean_of_many_points_is_named() -> None:
    points = [(float(x), 1.0 / x) for x in range(1, 41)]
    plot = line(points, x_label="step", y_label="nats", describe="loss")
    assert _curve(plot, "measured")[1] == [y for _, y in points]
    assert plot.names == ("measured", "moving mean of 3 points (dashed)")
    assert _curve(plot, "mean")[1][1] == pytest.approx((1 + 1 / 2 + 1 / 3) / 3)
    assert _axes(plot).get_ylabel() == "nats"
    few = line(points[:39], x_label="step", describe="loss")
    assert few.names == ()
    assert [curve.get_gid() for curve in _axes(few).lines if curve.get_gid() == "mean"] == []


def test_a_moving_mean_keeps_the_first_and_the_last_value() -> None:
    assert plots._smoothed([4.0, 1.0, 1.0, 7.0]) == [4.0, 2.0, 3.0, 7.0]


def test_curves_share_one_scale_and_empty_ones_keep_their_tone() -> None:
    plot = lines([("a", [(1, 2.0), (2, 2.0)]), ("b", []), ("c", [(1, 1.0)])], x_label="step", describe="loss")
    assert plot.names == ("a", "b", "c")
    curves = {curve.get_gid(): curve.get_color() for curve in _axes(plot).lines if curve.get_gid()}
    assert curves == {"curve-0": plots._colour("tone-0"), "curve-2": plots._colour("tone-2")}
    assert _axes(plot).get_ylim()[1] > 2.0


@pytest.mark.parametrize("count", [1, 2, 1000])
def test_areas_lie_on_each_other_without_a_gap(count: int) -> None:
    xs = [float(step) for step in range(1, count + 1)]
    plot = areas(xs, [("a", [1.0] * count), ("b", [3.0] * count)], x_label="step", describe="time")
    lower, upper = (area.get_paths()[0].get_extents() for area in _axes(plot).collections)
    assert (lower.y0, lower.y1, upper.y0, upper.y1) == (0, 1, 1, 4)
    assert upper.x1 == count
    assert "area" not in plot.__html__()  # ids stay out of pages


def test_a_box_plot_shows_each_value_once_and_its_quartiles() -> None:
    plot = boxes(
        [("A", [0.1, 0.2, 0.3, 0.4, 0.5]), ("B", [0.9, 0.9])],
        stressed=1,
        marks=[0.3, 0.9],
        mark_name="chosen",
        describe="scores",
    )
    assert _curve(plot, "values-0")[1] == [0.1, 0.2, 0.3, 0.4, 0.5]
    assert _curve(plot, "values-1")[1] == [0.9, 0.9]
    levels = sorted({float(y) for curve in _axes(plot).lines[:6] for y in curve.get_ydata()})
    assert levels == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])


def test_scores_that_are_all_equal_are_drawn() -> None:
    for values in ([1.0, 1.0], [0.0]):
        ElementTree.fromstring(boxes([("A", values)], describe="scores").__html__())


def test_a_heat_map_frames_the_chosen_cell_dashes_impossible_ones_and_names_each_value() -> None:
    plot = heat_map(
        ["4", "16"], ["8", "32"], [[0.5, 0.75], [None, 1.0]], chosen=(1, 1), row_label="min", column_label="max",
        describe="scores", value_format=".0%",
    )  # fmt: skip
    cells = {patch.get_gid(): patch for patch in _axes(plot).patches}
    assert cells["chosen"].get_xy() == cells["cell: min 16, max 32: 100%"].get_xy()
    assert cells["void"].get_xy() != cells["chosen"].get_xy()
    alphas = [cells[f"cell: min {row}, max {column}"].get_alpha() for row, column in
              (("4", "8: 50%"), ("4", "32: 75%"), ("16", "32: 100%"))]  # fmt: skip
    assert alphas == [0.05, 0.3, 0.55]
    assert "<title>min 4, max 8: 50%</title>" in plot.__html__()


def test_a_heat_map_has_no_colour_at_its_lowest_value_and_below() -> None:
    plot = heat_map(
        ["3"], [str(step) for step in range(13)], [[0.5, 1.0, *[2.0] * 11]], low=1.0, row_label="layer",
        column_label="step", describe="load", value_format=".2f",
    )  # fmt: skip
    assert [patch.get_alpha() for patch in _axes(plot).patches[:3]] == [0.05, 0.05, 0.55]
    assert not _axes(plot).texts  # many cells have tooltips alone


def test_a_histogram_draws_each_bin_and_the_limit() -> None:
    plot = histogram([0, 10, 20, 30], [4, 0, 2], x_label="tokens", describe="load", limit=40)
    assert [(bar.get_x(), bar.get_width(), bar.get_height()) for bar in _axes(plot).patches] == [
        (0, 10, 4), (10, 10, 0), (20, 10, 2),
    ]  # fmt: skip
    assert _curve(plot, "limit")[0] == [40, 40]
    assert _axes(plot).get_xlim()[1] > 40
    ElementTree.fromstring(histogram([0, 1], [0], x_label="nothing", describe="empty").__html__())


def test_paired_bars_are_as_long_as_their_shares() -> None:
    plot = paired_bars([("a", 0.5, 0.25), ("b" * 30, 0.5, 0.75)], names=("asked", "got"), describe="shares")
    assert [bar.get_width() for bar in _axes(plot).patches] == [0.5, 0.5, 0.25, 0.75]
    assert "b" * 21 + "~" in plot.__html__()
