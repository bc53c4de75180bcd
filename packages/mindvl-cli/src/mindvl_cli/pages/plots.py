# SPDX-License-Identifier: Apache-2.0
"""Plots of pages and documents, drawn by matplotlib without pyplot: no display and no global state.

Comes after the figures that a page shows, before render.py. Plots are drawn in the light colours of style.css. Inside a
page each colour becomes the CSS variable that it came from, so that a plot follows the page in dark mode and in print.
A file of its own carries the dark colours in a style element and has a transparent background.
"""

import functools
import html
import io
import math
import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from statistics import fmean
from typing import Any

import numpy as np

MAX_POINTS = 400  # of one curve, more than a plot has pixels; longer curves are thinned evenly
MEAN_FROM = 40  # points of a curve; a mean over fewer hides what they show
NUM_TONES = 10  # colours of curves and areas in style.css

_SMALL, _WIDE = (4.4, 2.6), (9.0, 3.4)  # inches
_FONT = "'DejaVu Sans', sans-serif"  # as matplotlib writes the family that _RC asks for
_RC: dict[Any, Any] = {"svg.fonttype": "none", "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"]}

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A drawn figure; templates write it as inline SVG.

    Attributes:
        describe: What the plot shows, for people who cannot see it; unique on its page.
        names: Of its curves or areas in the order of their tones, for a legend below it.
    """

    figure: Any  # matplotlib.figure.Figure
    describe: str
    names: tuple[str, ...] = ()

    def __html__(self) -> str:
        """SVG for a page: no fixed size, no ids of its own, colours by CSS variables."""
        text = self._drawn()
        width, height = (72 * size for size in self.figure.get_size_inches())
        least = f";min-width:{0.8 * width:.0f}px" if width > 400 else ""  # scrolls on a phone, or text gets too small
        text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", text, flags=re.DOTALL)
        text = re.sub(r'<g id="cell: ([^"]*)">', r"<g><title>\1</title>", text)
        text = re.sub(r' ?<g id="[^"]*"/>\n', "", text)
        text = re.sub(r'<g id="[^"]*">', "<g>", text).replace("xlink:href", "href")
        text = text.replace(f"font-family: {_FONT}; ", "")
        for name, colour in _colours()[0].items():
            text = text.replace(f" {colour}", f" var(--{name})")
        head = f'viewBox="0 0 {width:g} {height:g}" style="max-width:{1.5 * width:.0f}px{least}"'
        label = html.escape(self.describe)
        return re.sub(
            "<svg[^>]*>", lambda _: f'<svg class="plot" role="img" aria-label="{label}" {head}>', text, count=1
        )

    def svg(self) -> str:
        """A whole SVG file."""
        light, dark = _colours()
        rules = "".join(
            f'[style*="{kind}: {light[name]}"]{{{kind}:{colour}!important}}'
            for name, colour in dark.items()
            if name in light
            for kind in ("fill", "stroke")
        )
        text = self._drawn().replace(_FONT, "system-ui, sans-serif")
        text = text.replace("</style>", f"@media (prefers-color-scheme: dark){{{rules}}}</style>", 1)
        title = f"<title>{html.escape(self.describe)}</title>"
        return re.sub("(<svg[^>]*>)", lambda match: f'{match[1][:-1]} role="img">\n {title}', text, count=1)

    def png(self) -> bytes:
        """A PNG file on a white background."""
        file = io.BytesIO()
        self.figure.savefig(file, format="png", dpi=150, facecolor="white")
        return file.getvalue()

    def _drawn(self) -> str:
        """What matplotlib writes, without the preamble, and with two digits of each coordinate."""
        import matplotlib

        for artist in self.figure.findobj():
            artist.set_clip_on(False)  # marks at the border are drawn whole, and the file has no clip paths
        file = io.BytesIO()
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))  # nothing that differs between two runs
        with matplotlib.rc_context({**_RC, "svg.hashsalt": self.describe}), warnings.catch_warnings():
            # Only the width of a Chinese name is estimated by this font: the reader's font draws it.
            warnings.filterwarnings("ignore", "Glyph .* missing from font")
            self.figure.savefig(file, format="svg", transparent=True, metadata=metadata)
        text = file.getvalue().decode()
        text = text[text.index("<svg") :]
        return re.sub(r" d=\"[^\"]*\"", lambda match: re.sub(r"(\.\d\d)\d+|\s*\n", r"\1", match[0]), text)


def line(points: Points, *, x_label: str, y_label: str = "", describe: str) -> Plot:
    """One curve of measured values, at least one point (x, y), y >= 0.

    From MEAN_FROM points on, a dashed moving mean is drawn over it, which the legend names.
    """
    figure, axes = _axes(*_SMALL)
    xs, ys = _thinned(points)
    axes.plot(xs, ys, color=_colour("tone-0"), linewidth=1.6, gid="measured")
    axes.plot(xs[-1:], ys[-1:], "o", color=_colour("tone-0"), markersize=4)
    names: tuple[str, ...] = ()
    if len(points) >= MEAN_FROM:
        reach = _reach(len(ys))
        axes.plot(xs, _smoothed(ys), color=_colour("tone-1"), linewidth=1.4, linestyle="--", gid="mean")
        names = ("measured", f"moving mean of {2 * reach + 1} points (dashed)")
    return _over_steps(figure, axes, xs, ys, x_label, describe, names, y_label)


def lines(
    curves: Sequence[tuple[str, Points]], *, x_label: str, y_label: str = "", describe: str, star: float | None = None
) -> Plot:
    """Measured values of several named curves; with a star, at this x of the first one, every point is drawn."""
    figure, axes = _axes(*_SMALL)
    drawn = [(number, *_thinned(points)) for number, (_, points) in enumerate(curves) if points]
    for number, xs, ys in drawn:
        colour = _colour(f"tone-{number % NUM_TONES}")
        axes.plot(xs, ys, color=colour, linewidth=1.5, gid=f"curve-{number}")
        axes.plot(*((xs, ys) if star is not None else (xs[-1:], ys[-1:])), "o", color=colour, markersize=3.5)
        if number == 0 and star in xs:
            axes.plot([star], [ys[xs.index(star)]], "*", color=colour, markersize=11, gid="star")
    names = tuple(name for name, _ in curves)
    all_xs, all_ys = [x for _, xs, _ in drawn for x in xs], [y for _, _, ys in drawn for y in ys]
    return _over_steps(figure, axes, all_xs, all_ys, x_label, describe, names, y_label)


def areas(
    xs: Sequence[float],
    layers: Sequence[tuple[str, Sequence[float]]],
    *,
    x_label: str,
    y_label: str = "",
    describe: str,
    limit: float | None = None,
) -> Plot:
    """Stacked areas: the named parts of a total, each with one value >= 0 for each x, and a dashed line at `limit`."""
    figure, axes = _axes(*_WIDE)
    kept = _evenly(len(xs))
    places = [xs[place] for place in kept]
    values = [[layer[place] for place in kept] for _, layer in layers]
    if len(places) == 1:  # a single report is drawn as a bar over its steps
        places, values = [0.0, *places], [layer * 2 for layer in values]
    tones = [_colour(f"tone-{number % NUM_TONES}") for number in range(len(layers))]
    for number, drawn in enumerate(axes.stackplot(places, values, colors=tones, alpha=0.85, linewidth=0)):
        drawn.set_gid(f"area-{number}")
    totals = [sum(column) for column in zip(*values, strict=True)]
    if limit is not None:
        axes.axhline(limit, color=_colour("wrong"), linewidth=1.5, linestyle="--", gid="limit")
        totals.append(limit)
    return _over_steps(figure, axes, places, totals, x_label, describe, tuple(name for name, _ in layers), y_label)


def histogram(
    edges: Sequence[float], counts: Sequence[int], *, x_label: str, describe: str, limit: float | None = None
) -> Plot:
    """Counts between rising edges (one more than counts), and a dashed line at `limit`."""
    figure, axes = _axes(*_SMALL)
    axes.bar(edges[:-1], counts, width=np.diff(edges), align="edge", color=_colour("accent"), edgecolor=_colour("card"))
    if limit is not None:
        axes.axvline(limit, color=_colour("wrong"), linewidth=1.5, linestyle="--", gid="limit")
    axes.set_xlim(edges[0], max(edges[-1], 1.02 * (limit or 0)))
    axes.set_ylim(0, max(*counts, 1) * 1.05)
    axes.set_xlabel(x_label)
    return Plot(figure=figure, describe=describe)


def paired_bars(rows: Sequence[tuple[str, float, float]], *, names: tuple[str, str], describe: str) -> Plot:
    """Two horizontal bars for each row: what was requested and the result, as shares from 0 to 1."""
    figure, axes = _axes(5.4, 0.2 + 0.44 * len(rows), grid="")
    end = max(max(shares) for _, *shares in rows) or 1.0
    for number in range(2):
        places = [row + 0.2 * (2 * number - 1) for row in range(len(rows))]
        shares = [pair[number] for _, *pair in rows]
        axes.barh(places, shares, height=0.36, color=_colour(f"tone-{number}"))
        for place, share in zip(places, shares, strict=True):
            axes.text(share + 0.01 * end, place, f"{share:.1%}", va="center", color=_colour("soft"), fontsize=8)
    axes.set_yticks(range(len(rows)), [_short(label) for label, *_ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 1.15 * end)
    axes.set_xticks([])
    return Plot(figure=figure, describe=describe, names=names)


def boxes(groups: Sequence[tuple[str, Sequence[float]]], *, describe: str, stressed: int = -1,
          marks: Sequence[float] = (), mark_name: str = "") -> Plot:  # fmt: skip
    """One box for each named group of shares: quartiles, whiskers to the extremes, a dot for each value.

    Args:
        stressed: Place of the group in the accent colour.
        marks: One share for each group that is marked by a diamond, named `mark_name` in a legend.
    """
    figure, axes = _axes(max(4.4, 1.2 + 1.1 * len(groups)), 3.4)
    drawn = axes.boxplot(
        [list(map(float, values)) for _, values in groups], whis=(0, 100), showfliers=False, widths=0.4
    )
    for group, (_, values) in enumerate(groups):
        colour = _colour("accent" if group == stressed else "soft")
        for part, each in (("boxes", 1), ("medians", 1), ("whiskers", 2), ("caps", 2)):
            for artist in drawn[part][each * group : each * (group + 1)]:
                artist.set(color=colour, linewidth=2.5 if part == "medians" else 1.4)
        places = [group + 1.3 + 0.05 * (place % 3) for place in range(len(values))]  # the same in every run
        axes.plot(places, values, ".", color=colour, markersize=3, alpha=0.8, gid=f"values-{group}")
    if marks:
        axes.plot(
            range(1, len(groups) + 1), marks, "D", color=_colour("wrong"), markersize=5, zorder=5, label=mark_name
        )
        figure.legend(loc="outside upper right", frameon=False, labelcolor=_colour("soft"), fontsize=9)
    axes.set_xticks(range(1, len(groups) + 1), [_short(name) for name, _ in groups])
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.3g}%")
    return Plot(figure=figure, describe=describe)


def heat_map(
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float | None]],
    *,
    row_label: str,
    column_label: str,
    describe: str,
    value_format: str,
    low: float | None = None,
    least_span: float = 1e-9,
    chosen: tuple[int, int] | None = None,
) -> Plot:
    """A grid of values, stronger colour for higher ones; a None is a dashed cell, `chosen` (row, column) is framed.

    Args:
        value_format: Written into each cell where cells are large, and into its tooltip always.
        low: Value without colour; the lowest one when None.
        least_span: Difference that full colour stands for at least, so that noise does not look like a result.
    """
    is_large = len(columns) <= 12
    figure, axes = _axes(
        1.2 + (0.85 if is_large else 0.14) * len(columns), 0.8 + (0.55 if is_large else 0.2) * len(rows), grid=""
    )
    known = [value for row in values for value in row if value is not None]
    low = min(known) if low is None else low
    span = max(max(known) - low, least_span)
    from matplotlib.patches import Rectangle

    for i, row in enumerate(values):
        for j, value in enumerate(row):
            cell = Rectangle((j - 0.47, i - 0.46), 0.94, 0.92, linewidth=0)
            if value is None:
                cell.set(fill=False, edgecolor=_colour("muted"), linewidth=1, linestyle=":", gid="void")
            else:
                text = format(value, value_format)
                heat = max(0.0, value - low) / span
                cell.set(facecolor=_colour("accent"), alpha=round(0.05 + 0.5 * heat, 3))
                cell.set_gid(f"cell: {row_label} {rows[i]}, {column_label} {columns[j]}: {text}")
                if is_large:
                    axes.text(j, i, text, ha="center", va="center", color=_colour("ink"), fontsize=10)
            if (i, j) == chosen:
                frame = Rectangle(
                    (j - 0.47, i - 0.46), 0.94, 0.92, fill=False, edgecolor=_colour("wrong"), linewidth=2.5
                )
                axes.add_patch(frame).set_gid("chosen")
            axes.add_patch(cell)
    every = 1 if is_large else math.ceil(len(columns) / 12)
    axes.set_xticks(range(0, len(columns), every), columns[::every])
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(column_label)
    axes.set_ylabel(row_label)
    return Plot(figure=figure, describe=describe)


def front(
    points: Sequence[tuple[float, float, bool]],
    *,
    x_label: str,
    describe: str,
    chosen: tuple[float, float] | None = None,
) -> Plot:
    """Cost and score of each choice; a stepped line joins those that no other one beats.

    Args:
        points: Cost, score as a share, and whether the point is on the front.
        chosen: Point that is marked by a diamond.
    """
    figure, axes = _axes(5.4, 3.2)
    others, best = ([point[:2] for point in points if point[2] is on] for on in (False, True))
    axes.plot([x for x, _ in others], [y for _, y in others], "o", color=_colour("soft"), markersize=4, gid="others")
    xs, ys = [x for x, _ in sorted(best)], [y for _, y in sorted(best)]
    axes.plot(xs, ys, "o-", color=_colour("accent"), markersize=5, drawstyle="steps-post", gid="front")
    if chosen is not None:
        axes.plot(*[[value] for value in chosen], "D", color=_colour("wrong"), markersize=6, gid="chosen")
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.3g}%")
    axes.set_xlabel(x_label)
    return Plot(figure=figure, describe=describe)


def compared_losses(
    steps: Sequence[int], ours: Sequence[float], plain: Sequence[float], differences: Sequence[float], *, bound: float,
    titles: tuple[str, str], describe: str,
) -> Plot:  # fmt: skip
    """Two loss curves on each other, and below their relative difference on a log scale with its bound (dashed)."""
    figure, _ = _axes(7.6, 4.6, rows=2)
    upper, lower = figure.axes
    upper.plot(steps, plain, color=_colour("tone-2"), linewidth=6, alpha=0.75, gid="plain")
    upper.plot(steps, ours, color=_colour("accent"), linewidth=1.8, gid="ours")
    lower.semilogy(steps, np.maximum(differences, 1e-9), color=_colour("accent"), linewidth=1.4, gid="difference")
    lower.axhline(bound, color=_colour("wrong"), linestyle="--", linewidth=1.4, gid="bound")
    lower.set_xlabel("step")
    for axes, title in zip((upper, lower), titles, strict=True):
        axes.set_title(title, loc="left", fontsize=10, color=_colour("soft"))
    return Plot(figure=figure, describe=describe)


def _axes(width: float, height: float, *, grid: str = "y", rows: int = 1) -> tuple[Any, Any]:
    """A figure in inches and its (last) axes, without frame and tick marks."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    for axes in np.ravel(figure.subplots(rows, sharex=True, height_ratios=[2, 1][:rows])):
        axes.tick_params(length=0, which="both", labelsize=10 if width < 7 else 11, colors=_colour("soft"))
        axes.spines[:].set_visible(False)
        axes.xaxis.label.set_color(_colour("soft"))
        axes.yaxis.label.set_color(_colour("soft"))
        axes.set_axisbelow(True)
        if grid:
            axes.grid(axis=grid, color=_colour("line"), linewidth=1)
    return figure, axes


def _over_steps(
    figure: Any,
    axes: Any,
    xs: Iterable[float],
    ys: Iterable[float],
    x_label: str,
    describe: str,
    names: tuple[str, ...] = (),
    y_label: str = "",
) -> Plot:
    """Set the axes of a curve from 0 up to its highest value."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(0, max(xs) or 1)
    highest = max((y for y in ys if math.isfinite(y)), default=0)  # a loss may be infinite
    axes.set_ylim(0, 1.08 * highest if highest > 0 else 1)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
        axis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value >= 10_000 else f"{value:.4g}")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    return Plot(figure=figure, describe=describe, names=names)


def _thinned(points: Points) -> tuple[list[float], list[float]]:
    kept = [points[place] for place in _evenly(len(points))]
    return [x for x, _ in kept], [y for _, y in kept]


def _evenly(count: int) -> list[int]:
    """At most MAX_POINTS of `count` places at even distances, the first and the last among them."""
    if count <= MAX_POINTS:
        return list(range(count))
    return [round(index * (count - 1) / (MAX_POINTS - 1)) for index in range(MAX_POINTS)]


def _smoothed(values: Sequence[float]) -> list[float]:
    """A moving mean over a twentieth of the curve, narrower at the ends so that first and last value stay."""
    reach, last = _reach(len(values)), len(values) - 1
    near = [min(reach, index, last - index) for index in range(len(values))]
    return [fmean(values[index - width : index + width + 1]) for index, width in enumerate(near)]


def _reach(count: int) -> int:
    """Values on each side of a value that its moving mean takes."""
    return max(1, count // 40)


def _short(name: str, most: int = 22) -> str:
    name = name if len(name) <= most else f"{name[: most - 1]}~"
    return name.replace("$", r"\$")  # matplotlib reads what stands between two of them as a formula


def _colour(name: str) -> str:
    return _colours()[0][name]


@functools.cache
def _colours() -> tuple[dict[str, str], dict[str, str]]:
    """Colours of style.css by the names of their variables: light ones and dark ones."""
    style = files("mindvl_cli.pages").joinpath("style.css").read_text(encoding="utf-8")
    light, dark = re.findall(r":root\s*{(.*?)}", style, re.DOTALL)[:2]
    return tuple(dict(re.findall(r"--([\w-]+): (#\w{6});", block)) for block in (light, dark))  # type: ignore[return-value]
