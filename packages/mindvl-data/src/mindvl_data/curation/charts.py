# SPDX-License-Identifier: Apache-2.0
"""Charts of small tables of numbers, drawn by matplotlib. Used by the step `chart_table` in tables.py. B.1.3."""

import io
import random
import re
from collections.abc import Sequence
from typing import Any

from PIL import Image

from mindvl_data.curation.extras import require

_NUMBER = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?|[-+]?\d+(?:\.\d+)?|[-+]?\.\d+")
_COLORS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown", "tab:gray", "tab:cyan")
_MAX_LABEL = 40
_Curve = tuple[str, str, Sequence[float]]  # name, color, values


def chart_series(texts: Sequence[Sequence[str]]) -> list[list[float]] | None:
    """The numbers of all columns but the first, below the first row; None if a cell is not a number or rows differ."""
    if len(texts) < 3 or len(texts[0]) < 2 or len({len(row) for row in texts}) != 1:
        return None
    if any(not row[0] or len(row[0]) > _MAX_LABEL for row in texts[1:]):
        return None
    columns: list[list[float]] = []
    for column in range(1, len(texts[0])):
        cells = [row[column].strip().rstrip("%") for row in texts[1:]]
        if not all(_NUMBER.fullmatch(cell) for cell in cells):
            return None
        columns.append([float(cell.replace(",", "")) for cell in cells])
    return columns


def chart_image(
    kind: str,
    texts: Sequence[Sequence[str]],
    series: Sequence[Sequence[float]],
    title: str,
    font: str,
    chance: random.Random,
) -> bytes:
    """A chart as PNG; colors, size and labels depend on `chance`.

    Args:
        kind: "bar", "barh", "line" or "pie".
        texts: The table; its first row has the names of the series, its first column the categories.
        series: The numbers, as chart_series returns them.
        title: Title; "" for none.
        font: Font file.
    """
    matplotlib = require("matplotlib", extra="plots", where="steps: chart_table")
    fonts = require("matplotlib.font_manager", extra="plots", where="steps: chart_table")
    fonts.fontManager.addfont(font)
    family = fonts.FontProperties(fname=font).get_name()
    with matplotlib.rc_context({"font.family": [family], "text.parse_math": False, "axes.unicode_minus": False}):
        return _drawn(kind, texts, series, title, chance)


def _drawn(
    kind: str, texts: Sequence[Sequence[str]], series: Sequence[Sequence[float]], title: str, chance: random.Random
) -> bytes:
    figure_module = require("matplotlib.figure", extra="plots", where="steps: chart_table")
    names, labels = texts[0][1:], [row[0] for row in texts[1:]]
    size = (chance.uniform(4.5, 7.5), chance.uniform(3.2, 5.0))
    figure = figure_module.Figure(figsize=size, dpi=chance.choice((80, 96, 110)), layout="constrained")
    axes = figure.subplots()
    colors = chance.sample(_COLORS, len(_COLORS))
    curves = [(names[index], colors[index], values) for index, values in enumerate(series)]
    if kind == "line":
        _lines(axes, labels, curves, chance)
    elif kind == "pie":
        shown = [f"{label} ({value:g})" for label, value in zip(labels, series[0], strict=True)]
        axes.pie(series[0], labels=shown, colors=colors, startangle=chance.randint(0, 359))
    else:
        _bars(axes, kind, labels, curves)
    if title:
        axes.set_title(title[:100])
    if len(series) > 1:
        axes.legend()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    plain = io.BytesIO()  # without matplotlib's version in the metadata
    Image.open(buffer).convert("RGB").save(plain, "PNG")
    return plain.getvalue()


def _bars(axes: Any, kind: str, labels: Sequence[str], curves: Sequence[_Curve]) -> None:
    wide = 0.8 / len(curves)
    draw = axes.bar if kind == "bar" else axes.barh
    for index, (name, color, values) in enumerate(curves):
        places = [place + (index - (len(curves) - 1) / 2) * wide for place in range(len(labels))]
        axes.bar_label(draw(places, values, wide, label=name, color=color), fmt="{:g}", fontsize=8)
    ticks = axes.set_xticks if kind == "bar" else axes.set_yticks
    rotation = 30 if kind == "bar" and max(map(len, labels)) > 6 else 0
    ticks(range(len(labels)), labels, rotation=rotation)


def _lines(axes: Any, labels: Sequence[str], curves: Sequence[_Curve], chance: random.Random) -> None:
    for name, color, values in curves:
        axes.plot(range(len(labels)), values, marker=chance.choice("os^D"), label=name, color=color)
        for place, value in enumerate(values):
            axes.annotate(
                f"{value:g}", (place, value), textcoords="offset points", xytext=(0, 5), fontsize=8, ha="center"
            )
    axes.set_xticks(range(len(labels)), labels, rotation=30 if max(map(len, labels)) > 6 else 0)
    if chance.random() < 0.5:
        axes.grid(alpha=0.3)
