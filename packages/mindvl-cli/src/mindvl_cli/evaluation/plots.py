# SPDX-License-Identifier: Apache-2.0
"""Draw a resolution search: scores over the grid as a heat map, and boxes over the cells as in the paper's Figure 4."""

from pathlib import Path

from mindvl_cli.pages.plots import Plot, boxes, heat_map
from mindvl_cli.whole_file import write_whole
from mindvl_merge import ResolutionSearch

_UNIT_PIXELS = 28 * 28


def draw_heat_map(result: ResolutionSearch, out: Path) -> list[Path]:
    """Write `heat_map.png` and `.svg`: minimum over maximum, the chosen cell framed."""
    lows = sorted({cell.min_pixels for cell in result.cells})
    highs = sorted({cell.max_pixels for cell in result.cells})
    scores = {(cell.min_pixels, cell.max_pixels): cell.score for cell in result.cells}
    plot = heat_map(
        [f"{pixels / _UNIT_PIXELS:g}" for pixels in lows],
        [f"{pixels / _UNIT_PIXELS:g}" for pixels in highs],
        [[scores.get((low, high)) for high in highs] for low in lows],
        row_label="min pixels / 28x28",
        column_label="max pixels / 28x28",
        describe="Score by minimum and maximum image size",
        value_format=".1%",
        least_span=0.01,  # smaller differences are noise and should not look like a result
        chosen=(lows.index(result.chosen.min_pixels), highs.index(result.chosen.max_pixels)),
    )
    return _save(plot, out, "heat_map")


def draw_box_plot(result: ResolutionSearch, out: Path) -> list[Path]:
    """Write `box_plot.png` and `.svg`: one box over the cells per task and for the mean, a mark at the chosen cell."""
    groups = [(task, [cell.by_task[task] for cell in result.cells]) for task in result.chosen.by_task]
    chosen = list(result.chosen.by_task.values())
    if len(groups) > 1:
        groups.append(("overall", [cell.score for cell in result.cells]))
        chosen.append(result.chosen.score)
    plot = boxes(groups, marks=chosen, mark_name="chosen", describe="Scores of each task over the grid")
    return _save(plot, out, "box_plot")


def _save(plot: Plot, out: Path, name: str) -> list[Path]:
    write_whole(out / f"{name}.png", plot.png())
    write_whole(out / f"{name}.svg", plot.svg())
    return [out / f"{name}.png", out / f"{name}.svg"]
