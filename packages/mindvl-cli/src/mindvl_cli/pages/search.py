# SPDX-License-Identifier: Apache-2.0
"""Write a resolution search: its figures as JSON, a heat map over the grid, and box plots as in the paper's Figure 4.

Used by `mindvl search-resolution` and the demo.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mindvl_cli.pages.plots import Plot, boxes, heat_map
from mindvl_cli.whole_file import write_whole
from mindvl_merge.evaluation import ResolutionSearch, box_of

SEARCH_NAME = "resolution.json"

_UNIT_PIXELS = 28 * 28


def search_report(result: ResolutionSearch) -> dict[str, Any]:
    """The result as JSON values; `box` and `box_by_task` are the box plots of Figure 4."""
    tasks = result.cells[0].by_task
    return {
        "chosen": asdict(result.chosen),
        "cells": [asdict(cell) for cell in result.cells],
        "num_requests": result.num_requests,
        "num_evaluations": result.num_evaluations,
        "num_saved": result.num_saved,
        "box": asdict(box_of([cell.score for cell in result.cells])),
        "box_by_task": {task: asdict(box_of([cell.by_task[task] for cell in result.cells])) for task in tasks},
    }


def write_search(result: ResolutionSearch, out: Path, *, model: str) -> list[Path]:
    """Write figures, heat map and box plot; returns the files."""
    out.mkdir(parents=True, exist_ok=True)
    report = out / SEARCH_NAME
    write_whole(report, json.dumps({"model": model, **search_report(result)}, indent=2) + "\n")
    return [report, *draw_heat_map(result, out), *draw_box_plot(result, out)]


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
