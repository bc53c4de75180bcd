# SPDX-License-Identifier: Apache-2.0
"""Draw a resolution search: scores over the grid as a heat map, and boxes over the cells as in the paper's Figure 4."""

import io
from pathlib import Path
from typing import Any

from mindvl_cli.whole_file import write_whole
from mindvl_merge import ResolutionSearch, box_of

_UNIT_PIXELS = 28 * 28
_INK, _CHOSEN = "#2b5c8a", "#c2453a"


def draw_heat_map(result: ResolutionSearch, out: Path) -> list[Path]:
    """Write `heat_map.png` and `.svg`: minimum over maximum, the chosen cell framed."""
    import numpy as np

    lows = sorted({cell.min_pixels for cell in result.cells})
    highs = sorted({cell.max_pixels for cell in result.cells})
    table = np.full((len(lows), len(highs)), np.nan)
    for cell in result.cells:
        table[lows.index(cell.min_pixels), highs.index(cell.max_pixels)] = 100 * cell.score
    figure, axes = _figure(1.6 + 0.9 * len(highs), 1.4 + 0.6 * len(lows))
    low, high = np.nanmin(table), np.nanmax(table)
    # a point of score is the least that colours tell apart: noise below it should not look like a finding
    image = axes.imshow(table, cmap="Blues", aspect="auto", vmin=low, vmax=max(high, low + 1))
    middle = (low + max(high, low + 1)) / 2
    for (row, column), value in np.ndenumerate(table):
        if not np.isnan(value):
            colour = "white" if value > middle else "black"
            axes.text(column, row, f"{value:.1f}", ha="center", va="center", color=colour)
    place = highs.index(result.chosen.max_pixels) - 0.5, lows.index(result.chosen.min_pixels) - 0.5
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle(place, 1, 1, fill=False, edgecolor=_CHOSEN, linewidth=2.5))
    axes.set_xticks(range(len(highs)), [_units(pixels) for pixels in highs])
    axes.set_yticks(range(len(lows)), [_units(pixels) for pixels in lows])
    axes.set_xlabel("max pixels / 28x28")
    axes.set_ylabel("min pixels / 28x28")
    figure.colorbar(image, ax=axes, label="score, %")
    return _save(figure, out, "heat_map")


def draw_box_plot(result: ResolutionSearch, out: Path) -> list[Path]:
    """Write `box_plot.png` and `.svg`: one box over the cells per task and for the mean, a mark at the chosen cell."""
    columns = {task: [cell.by_task[task] for cell in result.cells] for task in result.chosen.by_task}
    chosen = dict(result.chosen.by_task)
    if len(columns) > 1:
        columns["overall"] = [cell.score for cell in result.cells]
        chosen["overall"] = result.chosen.score
    figure, axes = _figure(1.5 + 1.1 * len(columns), 3.2)
    boxes = []
    for name, values in columns.items():
        box = box_of([100 * value for value in values])
        boxes.append(
            {
                "label": name,
                "whislo": box.minimum,
                "q1": box.lower_quartile,
                "med": box.median,
                "q3": box.upper_quartile,
                "whishi": box.maximum,
                "fliers": [],
            }
        )
    axes.bxp(boxes, boxprops={"color": _INK}, medianprops={"color": _INK, "linewidth": 2}, showfliers=False)
    places = range(1, len(columns) + 1)
    axes.scatter(places, [100 * chosen[name] for name in columns], color=_CHOSEN, zorder=3, label="chosen")
    axes.set_ylabel("score over the grid, %")
    axes.legend(loc="best")
    return _save(figure, out, "box_plot")


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # not pyplot: no display, no global state

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _save(figure: Any, out: Path, name: str) -> list[Path]:
    paths = [out / f"{name}.png", out / f"{name}.svg"]
    for path in paths:
        drawn = io.BytesIO()
        # Without a date the same search draws the same file.
        options: dict[str, Any] = {"dpi": 150} if path.suffix == ".png" else {"metadata": {"Date": None}}
        figure.savefig(drawn, format=path.suffix[1:], **options)
        write_whole(path, drawn.getvalue())
    return paths


def _units(pixels: int) -> str:
    return f"{pixels / _UNIT_PIXELS:g}"
