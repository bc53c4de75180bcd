# SPDX-License-Identifier: Apache-2.0
"""Draw charts as inline SVG: a line, a histogram, bars, box plots, a heat map.

Drawn by hand because the colours must follow the page (light, dark, print): every mark takes its colour from a CSS
class of style.css, which matplotlib's SVG cannot do.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from html import escape

MAX_LINE_POINTS = 400  # more than a chart has pixels; longer curves are thinned evenly

_WIDTH, _HEIGHT = 320, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 40, 10, 12, 26
_TONES = 10  # colours of style.css


def line_chart(points: Sequence[tuple[float, float]], *, x_label: str, describe: str) -> str:
    """A curve over steps with its smoothed course on top; `points` are (x, y), at least one."""
    points = _thinned(points)
    xs, ys = [x for x, _ in points], [y for _, y in points]
    x_end, y_end = max(xs) or 1, _ceiling(max(ys))
    x_of = _Scale(0, x_end, _LEFT, _WIDTH - _RIGHT)
    y_of = _Scale(0, y_end, _HEIGHT - _BOTTOM, _TOP)
    raw = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in points)
    smooth = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in zip(xs, _smoothed(ys), strict=True))
    body = [
        *_frame(x_end, y_end, x_of, y_of, x_label),
        f'<polyline class="raw" points="{raw}"/><polyline class="curve" points="{smooth}"/>',
        f'<circle class="dot" cx="{x_of(xs[-1]):.1f}" cy="{y_of(ys[-1]):.1f}" r="3"/>',
    ]
    return _svg(_WIDTH, _HEIGHT, body, describe)


def histogram(
    edges: Sequence[float], counts: Sequence[int], *, x_label: str, describe: str, limit: float | None = None
) -> str:
    """Counts of values between neighbouring edges, and a line at `limit` where there is one.

    Args:
        edges: Rising; one more than counts.
    """
    x_end = max(edges[-1], limit or 0.0)
    x_of = _Scale(edges[0], x_end, _LEFT, _WIDTH - _RIGHT)
    y_end = _ceiling(max(counts))
    y_of = _Scale(0, y_end, _HEIGHT - _BOTTOM, _TOP)
    bars = [
        f'<rect class="bar" x="{x_of(left) + 0.5:.1f}" y="{y_of(count):.1f}" '
        f'width="{max(x_of(right) - x_of(left) - 1, 0.5):.1f}" height="{y_of(0) - y_of(count):.1f}"/>'
        for left, right, count in zip(edges, edges[1:], counts, strict=False)
        if count
    ]
    ticks = [value for value in _ticks(0, x_end) if value >= edges[0]]
    body = [
        _y_axis(_ticks(0, y_end), y_of, _LEFT, _WIDTH - _RIGHT, _number),
        *bars,
        *(_text(x_of(x), _HEIGHT - 12, _number(x), "tick", "middle") for x in ticks),
        _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 1, x_label, "tick", "middle"),
    ]
    if limit is not None:
        body.append(
            f'<line class="limit" x1="{x_of(limit):.1f}" x2="{x_of(limit):.1f}" y1="{_TOP}" y2="{y_of(0):.1f}"/>'
        )
    return _svg(_WIDTH, _HEIGHT, body, describe)


def lines_chart(lines: Sequence[tuple[str, Sequence[tuple[float, float]]]], *, x_label: str, describe: str) -> str:
    """Several curves over steps, smoothed, each in its tone; `legend` names them. Empty curves are left out."""
    lines = [(name, _thinned(points)) for name, points in lines]
    known = [point for _, points in lines for point in points]
    x_end, y_end = max(x for x, _ in known) or 1, _ceiling(max(y for _, y in known))
    x_of, y_of = _Scale(0, x_end, _LEFT, _WIDTH - _RIGHT), _Scale(0, y_end, _HEIGHT - _BOTTOM, _TOP)
    body = _frame(x_end, y_end, x_of, y_of, x_label)
    for number, (_, points) in enumerate(lines):
        if points:
            ys = _smoothed([y for _, y in points])
            curve = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for (x, _), y in zip(points, ys, strict=True))
            body.append(f'<polyline class="series t{number % _TONES}" points="{curve}"/>')
            x, y = x_of(points[-1][0]), y_of(ys[-1])
            body.append(f'<circle class="end t{number % _TONES}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>')
    return _svg(_WIDTH, _HEIGHT, body, describe)


def stacked_areas(
    xs: Sequence[float], layers: Sequence[tuple[str, Sequence[float]]], *, x_label: str, describe: str
) -> str:
    """What a total is made of over steps, from the first layer at the bottom; `legend` names them.

    Args:
        layers: (name, one value from 0 for each x).
    """
    width, height = 680, 260
    kept = _evenly(len(xs))
    xs = [xs[place] for place in kept]
    sums = [0.0] * len(xs)
    bands = []
    for _, values in layers:
        below, sums = sums, [low + values[place] for low, place in zip(sums, kept, strict=True)]
        bands.append((below, sums))
    x_end, y_end = max(xs) or 1, _ceiling(max(sums))
    x_of, y_of = _Scale(0, x_end, _LEFT, width - _RIGHT), _Scale(0, y_end, height - _BOTTOM, _TOP)
    if len(xs) == 1:  # one report is drawn as a bar over its steps
        xs, bands = [0.0, *xs], [(below * 2, above * 2) for below, above in bands]
    body = _frame(x_end, y_end, x_of, y_of, x_label, width=width, height=height)
    for number, (below, above) in enumerate(bands):
        edge = [*zip(xs, above, strict=True), *reversed(list(zip(xs, below, strict=True)))]
        corners = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in edge)
        body.append(f'<polygon class="area t{number % _TONES}" points="{corners}"/>')
    return _svg(width, height, body, describe)


def shaded_grid(
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float]],
    *,
    low: float,
    row_title: str,
    column_title: str,
    describe: str,
) -> str:
    """Values over rows and columns, from white at `low` to full colour at the highest; a title tells each value."""
    left, top, height_of = 56, 30, 14
    width_of = max(6.0, min(28.0, 560 / len(columns)))
    width, height = left + width_of * len(columns) + 6, top + height_of * len(rows) + 24
    span = max(max(value for row in values for value in row) - low, 1e-9)
    every = max(1, math.ceil(len(columns) * 34 / (width_of * len(columns))))
    body = [_text(4, 20, row_title, "label"), _text(left, 20, column_title, "label")]
    for i, name in enumerate(rows):
        y = top + height_of * i
        body.append(_text(left - 8, y + 11, name, "tick", "end"))
        for j, value in enumerate(values[i]):
            heat = round(4 + 91 * max(0.0, value - low) / span)
            body.append(
                f'<rect class="cell" style="--heat:{heat}%" x="{left + width_of * j:.1f}" y="{y}" '
                f'width="{width_of - 0.6:.1f}" height="{height_of - 0.6}">'
                f"<title>{escape(row_title)} {escape(name)}, {escape(columns[j])}: {value:.2f}</title></rect>"
            )
    for j in range(0, len(columns), every):
        body.append(_text(left + width_of * (j + 0.5), height - 8, columns[j], "tick", "middle"))
    return _svg(width, height, body, describe)


def legend(names: Sequence[str]) -> str:
    """What the tones of lines_chart and stacked_areas mean, as HTML."""
    items = "".join(f'<li class="t{number % _TONES}">{escape(name)}</li>' for number, name in enumerate(names))
    return f'<ul class="key">{items}</ul>'


def paired_bars(rows: Sequence[tuple[str, float, float]], *, names: tuple[str, str], describe: str) -> str:
    """Two bars for each row, one above the other: what was asked and what came, as shares from 0 to 1."""
    left, slot, width = 150, 34, 460
    height = _TOP + slot * len(rows) + 22
    end = max(max(first, second) for _, first, second in rows) or 1.0
    x_of = _Scale(0, end, left, width - 52)
    body = []
    for index, (label, *shares) in enumerate(rows):
        y = _TOP + slot * index
        body.append(_text(left - 8, y + 17, label if len(label) <= 22 else f"{label[:21]}~", "label", "end"))
        for number, share in enumerate(shares):
            top = y + 3 + 12 * number
            kind = "bar soft" if number == 0 else "bar"
            length = max(x_of(share) - left, 0.5)
            body.append(f'<rect class="{kind}" x="{left}" y="{top}" width="{length:.1f}" height="10" rx="2"/>')
            body.append(_text(x_of(share) + 5, top + 9, f"{100 * share:.1f}%", "tick"))
    body.append(_text(left, height - 4, f"above: {names[0]}, below: {names[1]}", "tick"))
    return _svg(width, height, body, describe)


def box_plots(groups: Sequence[tuple[str, Sequence[float], bool]], *, describe: str) -> str:
    """One box for each group: quartiles, whiskers from lowest to highest, a dot for each value.

    Args:
        groups: (label, shares from 0 to 1, whether to stress it).
    """
    width, height = 460, 300
    values = [value for _, group, _ in groups for value in group]
    step = 0.05 if max(values) - min(values) < 0.4 else 0.2
    low = max(0.0, math.floor(min(values) / step - 0.25) * step)
    high = min(1.0, math.ceil(max(values) / step + 0.25) * step)
    y_of = _Scale(low, max(high, low + step), height - _BOTTOM, _TOP)
    body = [_y_axis(_ticks(low, max(high, low + step)), y_of, _LEFT, width - _RIGHT, percent_tick)]
    slot = (width - _LEFT - _RIGHT) / len(groups)
    for index, (label, group, stressed) in enumerate(groups):
        center = _LEFT + slot * (index + 0.5)
        body.append(_box(center, min(34.0, slot * 0.32), group, y_of, stressed))
        body.append(_text(center, height - 8, label, "label strong" if stressed else "label", "middle"))
    return _svg(width, height, body, describe)


def heat_map(
    rows: Sequence[str],
    columns: Sequence[str],
    scores: Sequence[Sequence[float | None]],
    *,
    chosen: tuple[int, int],
    row_title: str,
    column_title: str,
    describe: str,
) -> str:
    """A grid of shares from 0 to 1, darker for higher; `chosen` (row, column) is framed, None is left blank."""
    left, top, cell_width, cell_height = 76, 44, 62, 40
    width, height = left + cell_width * len(columns) + 6, top + cell_height * len(rows) + 6
    known = [score for row in scores for score in row if score is not None]
    low, span = min(known), max(max(known) - min(known), 1e-9)
    body = [
        _text(left + cell_width * len(columns) / 2, 14, column_title, "label", "middle"),
        *(_text(left + cell_width * (j + 0.5), 34, name, "tick", "middle") for j, name in enumerate(columns)),
        _text(4, 34, row_title, "label"),
    ]
    for i, name in enumerate(rows):
        y = top + cell_height * i
        body.append(_text(left - 10, y + cell_height / 2 + 4, name, "tick", "end"))
        for j, score in enumerate(scores[i]):
            x = left + cell_width * j
            if score is None:
                body.append(
                    f'<rect class="void" x="{x + 1.5}" y="{y + 1.5}" width="{cell_width - 3}" height="37" rx="4"/>'
                )
                continue
            heat = round(12 + 83 * (score - low) / span)
            shade = "on-dark" if heat > 55 else "on-light"
            frame = " chosen" if (i, j) == chosen else ""
            body.append(
                f'<rect class="cell{frame}" style="--heat:{heat}%" x="{x + 1.5}" y="{y + 1.5}" '
                f'width="{cell_width - 3}" height="37" rx="4"/>'
            )
            body.append(_text(x + cell_width / 2, y + 24.5, f"{100 * score:.1f}", f"cell-text {shade}", "middle"))
    return _svg(width, height, body, describe)


def percent_tick(share: float) -> str:
    """A share as whole percent."""
    return f"{round(100 * share)}%"


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile, with linear interpolation between values."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    first, median, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, median, third


def _box(center: float, half: float, values: Sequence[float], y_of: "_Scale", stressed: bool) -> str:
    first, median, third = (y_of(value) for value in quartiles(values))
    lowest, highest = y_of(min(values)), y_of(max(values))
    left = center - half / 2
    marks = [
        f'<line class="whisker" x1="{center:.1f}" x2="{center:.1f}" y1="{lowest:.1f}" y2="{highest:.1f}"/>',
        *(
            f'<line class="whisker" x1="{left:.1f}" x2="{left + half:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
            for y in (lowest, highest)
        ),
        f'<rect class="box" x="{center - half:.1f}" y="{third:.1f}" width="{2 * half:.1f}" '
        f'height="{max(first - third, 1):.1f}" rx="3"/>',
        f'<line class="median" x1="{center - half:.1f}" x2="{center + half:.1f}" y1="{median:.1f}" y2="{median:.1f}"/>',
    ]
    for index, value in enumerate(values):  # spread by position, so that two runs draw the same page
        x = center + half + 8 + 4 * (index % 3)
        marks.append(f'<circle class="value" cx="{x:.1f}" cy="{y_of(value):.1f}" r="1.6"/>')
    kind = "boxplot stressed" if stressed else "boxplot"
    return f'<g class="{kind}">{"".join(marks)}</g>'


class _Scale:
    """A straight map from values to pixels."""

    def __init__(self, start: float, end: float, pixel_start: float, pixel_end: float) -> None:
        self.start, self.pixel_start = start, pixel_start
        self.pixels_per_unit = (pixel_end - pixel_start) / ((end - start) or 1)

    def __call__(self, value: float) -> float:
        return self.pixel_start + (value - self.start) * self.pixels_per_unit


def _y_axis(ticks: Sequence[float], y_of: _Scale, left: float, right: float, show: Callable[[float], str]) -> str:
    marks = []
    for value in ticks:
        y = y_of(value)
        marks.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        marks.append(_text(left - 6, y + 3.5, show(value), "tick", "end"))
    return "".join(marks)


def _frame(
    x_end: float, y_end: float, x_of: _Scale, y_of: _Scale, x_label: str, *, width: int = _WIDTH, height: int = _HEIGHT
) -> list[str]:
    """Both axes of a chart over steps."""
    return [
        _y_axis(_ticks(0, y_end), y_of, _LEFT, width - _RIGHT, _number),
        # The last one ends at the border, where half of it would be cut off.
        *(
            _text(x_of(x), height - 8, _number(x), "tick", "middle" if x < 0.97 * x_end else "end")
            for x in _ticks(0, x_end)[1:]
        ),
        _text(_LEFT, height - 8, x_label, "tick"),
    ]


def _ticks(start: float, end: float, about: int = 4) -> list[float]:
    """Round values from start to end, about that many."""
    rough = (end - start) / about
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
    step = next(power * nice for nice in (1, 2, 2.5, 5, 10) if power * nice >= rough * 0.999)
    count = math.floor((end - start) / step + 1e-6)
    return [start + step * index for index in range(count + 1)]


def _ceiling(value: float) -> float:
    """A round number a little above the highest value, so that the curve fills the chart."""
    if value <= 0 or not math.isfinite(value):
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * nice for nice in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if power * nice >= value)


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [points[place] for place in _evenly(len(points))]


def _evenly(count: int, most: int = MAX_LINE_POINTS) -> list[int]:
    """At most that many of `count` places at even distances, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return [round(index * (count - 1) / (most - 1)) for index in range(most)]


def _smoothed(values: Sequence[float]) -> list[float]:
    """A moving mean over a twentieth of the curve, narrower at the ends so that first and last value stay."""
    reach = max(1, len(values) // 40)
    smooth = []
    for index in range(len(values)):
        near = min(reach, index, len(values) - 1 - index)
        smooth.append(statistics.fmean(values[index - near : index + near + 1]))
    return smooth


def _number(value: float) -> str:
    if value >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:.4g}"


def _text(x: float, y: float, content: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'


def _svg(width: float, height: float, body: Sequence[str], describe: str) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(describe)}" '
        f'style="max-width:{width * 1.35:.0f}px">{"".join(body)}</svg>'
    )
