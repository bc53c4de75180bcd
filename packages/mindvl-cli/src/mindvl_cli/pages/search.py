# SPDX-License-Identifier: Apache-2.0
"""Write resolution searches: figures as JSON, a page, and the plots of the paper's Figures 4 and 8 to 11.

Used by `mindvl search-resolution` and the demo; pages/templates/resolution.html.j2 is the page.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from math import isqrt
from pathlib import Path
from typing import Any

from mindvl_cli.pages.plots import Plot, boxes, front, heat_map
from mindvl_cli.pages.render import render
from mindvl_cli.whole_file import write_whole
from mindvl_merge.evaluation import Box, CellScore, ResolutionSearch, box_of, pareto_front, scores_over_grid

SEARCH_NAME = "resolution.json"
PAGE_NAME = "resolution.html"


def search_report(result: ResolutionSearch) -> dict[str, Any]:
    """The result as JSON values; `box` and `box_by_task` are the box plots of Figure 4."""
    tasks = result.cells[0].by_task
    whole = _whole_cells(result)
    return {
        "chosen": asdict(result.chosen),
        "chosen_by_task": {task: asdict(cell) for task, cell in result.chosen_by_task.items()},
        "cells": [asdict(cell) for cell in result.cells],
        "num_distinct": result.num_distinct,
        "num_requests": result.num_requests,
        "num_evaluations": result.num_evaluations,
        "num_saved": result.num_saved,
        "pareto_front": [asdict(cell) for cell in pareto_front(whole)],
        "pareto_front_by_seconds": [asdict(cell) for cell in pareto_front(whole, "seconds")],
        "holdout": asdict(result.holdout) if result.holdout else None,
        "box": asdict(box_of([cell.score for cell in result.cells])),
        "box_by_task": {task: asdict(box_of([cell.by_task[task] for cell in result.cells])) for task in tasks},
    }


def write_search(result: ResolutionSearch, out: Path, *, model: str) -> list[Path]:
    """Write figures, heat map, box plot and page of one model; returns the files."""
    out.mkdir(parents=True, exist_ok=True)
    report = out / SEARCH_NAME
    write_whole(report, json.dumps({"model": model, **search_report(result)}, indent=2) + "\n")
    page = write_page({model: result}, out / PAGE_NAME)
    return [report, *draw_heat_map(result, out), *draw_box_plot(result, out), page]


def write_page(results: Mapping[str, ResolutionSearch], path: Path) -> Path:
    """Write the page of one or several models, each with its maps; returns the file."""
    models = [_model(name, result) for name, result in results.items()]
    compared = _compared(results) if len(results) > 1 else []
    spread = [
        (task, Path(name).name, *(f"{100 * value:.1f}" for value in asdict(box).values()))
        for task, by_model in robustness(results).items()
        for name, box in by_model.items()
    ]
    write_whole(path, render("resolution", title="Resolution search", models=models, compared=compared, spread=spread))
    return path


def robustness(results: Mapping[str, ResolutionSearch]) -> dict[str, dict[str, Box]]:
    """The boxes of the paper's Figure 4: for each task and over all tasks, the scores of each model over the grid."""
    scores = {name: scores_over_grid(result.cells) for name, result in results.items()}
    tasks = next(iter(scores.values()))
    return {task: {name: box_of(by_task[task]) for name, by_task in scores.items()} for task in tasks}


def _compared(results: Mapping[str, ResolutionSearch]) -> list[tuple[str, Plot]]:
    """One panel of Figure 4 for each task, with one box for each model."""
    scores = {name: scores_over_grid(result.cells) for name, result in results.items()}
    panels = []
    for task in next(iter(scores.values())):
        chosen = [
            result.chosen.score if task == "overall" else result.chosen.by_task[task] for result in results.values()
        ]
        groups = [(Path(name).name, by_task[task]) for name, by_task in scores.items()]
        describe = f"Scores of each model over the grid, {task}"
        panels.append((task, boxes(groups, marks=chosen, mark_name="chosen for all tasks", describe=describe)))
    return panels


def draw_heat_map(result: ResolutionSearch, out: Path) -> list[Path]:
    """Write `heat_map.png` and `.svg`: minimum over maximum, the chosen cell framed."""
    return _save(_heat_map(result), out, "heat_map")


def draw_box_plot(result: ResolutionSearch, out: Path) -> list[Path]:
    """Write `box_plot.png` and `.svg`: one box over the cells per task and for the mean, a mark at the chosen cell."""
    return _save(_box_plot(result), out, "box_plot")


def _model(name: str, result: ResolutionSearch) -> dict[str, Any]:
    """The values of one model for the page."""
    tasks = list(result.chosen_by_task)
    whole = _whole_cells(result)
    maps = [(f"all tasks, {_distinct(result)}", _heat_map(result, name=name))]
    if len(tasks) > 1:
        maps += [
            (f"{task}: {result.num_distinct[task]} distinct of {len(result.cells)}", _heat_map(result, task, name=name))
            for task in tasks
        ]
    chosen = [("all", *_limits(result, result.chosen), f"{100 * result.chosen.score:.1f}", *_costs(result.chosen))]
    chosen += [
        (task, *_limits(result, cell), f"{100 * cell.by_task[task]:.1f}", *_costs(cell))
        for task, cell in result.chosen_by_task.items()
    ]
    return {
        "name": name,
        "unit": _unit(result),
        "chosen": chosen,
        "evaluations": f"{result.num_evaluations:,} of {result.num_requests:,}",
        "holdout": _holdout(result),
        "maps": maps,
        "boxes": _box_plot(result, name=name),
        "fronts": _fronts(whole, result.chosen, name),
    }


def _fronts(cells: list[CellScore], chosen: CellScore, name: str) -> list[tuple[str, Plot]]:
    """Score against visual tokens and against time, where these are known."""
    fronts = []
    if any(cell.visual_tokens for cell in cells):
        best = {id(cell) for cell in pareto_front(cells)}
        tokens = [(cell.visual_tokens, cell.score, id(cell) in best) for cell in cells]
        mark = (chosen.visual_tokens, chosen.score)
        fronts.append(("visual tokens", "visual tokens of an item", tokens, mark))
    if all(cell.seconds is not None for cell in cells):
        best = {id(cell) for cell in pareto_front(cells, "seconds")}
        seconds = [(cell.seconds or 0.0, cell.score, id(cell) in best) for cell in cells]
        fronts.append(("time", "seconds per answer", seconds, (chosen.seconds or 0.0, chosen.score)))
    return [
        (
            f"Score against {cost}; the line joins the cells that no cheaper one matches",
            front(points, x_label=label, describe=f"Score against {cost} of {name}", chosen=mark),
        )
        for cost, label, points, mark in fronts
    ]


def _costs(cell: CellScore) -> tuple[str, str]:
    return f"{cell.visual_tokens:.0f}", "-" if cell.seconds is None else f"{cell.seconds:.3g}"


def _holdout(result: ResolutionSearch) -> list[tuple[str, ...]]:
    found = result.holdout
    if found is None:
        return []
    rows = {"one choice for all": found.chosen, "own choice of each": found.per_task, "gain of own choices": found.gain}
    rows |= {f"own choice of {task}": interval for task, interval in found.by_task.items()}
    return [
        (name, f"{100 * one.mean:.1f}", f"{100 * one.low:.1f} to {100 * one.high:.1f}") for name, one in rows.items()
    ]


def _distinct(result: ResolutionSearch) -> str:
    counts = sorted(set(result.num_distinct.values()))
    return f"{counts[-1] if counts else len(result.cells)} distinct of {len(result.cells)}"


def _limits(result: ResolutionSearch, cell: CellScore) -> tuple[str, str]:
    return f"{cell.min_pixels / result.unit_pixels:g}", f"{cell.max_pixels / result.unit_pixels:g}"


def _unit(result: ResolutionSearch) -> str:
    """The size of a visual token, such as 32x32."""
    side = isqrt(result.unit_pixels)
    return f"{side}x{side}"


def _whole_cells(result: ResolutionSearch) -> list[CellScore]:
    """The cells that were scored on all items."""
    most = max(cell.num_items for cell in result.cells)
    return [cell for cell in result.cells if cell.num_items == most]


def _heat_map(result: ResolutionSearch, task: str | None = None, *, name: str = "") -> Plot:
    lows = sorted({cell.min_pixels for cell in result.cells})
    highs = sorted({cell.max_pixels for cell in result.cells})
    shown = {
        (cell.min_pixels, cell.max_pixels): cell.score if task is None else cell.by_task[task]
        for cell in _whole_cells(result)
    }
    best = result.chosen if task is None else result.chosen_by_task[task]
    of_task = f" for {task}" if task else ""
    return heat_map(
        [f"{pixels / result.unit_pixels:g}" for pixels in lows],
        [f"{pixels / result.unit_pixels:g}" for pixels in highs],
        [[shown.get((low, high)) for high in highs] for low in lows],
        row_label=f"min pixels / {_unit(result)}",
        column_label=f"max pixels / {_unit(result)}",
        describe=f"Score by minimum and maximum image size{of_task}{f', {name}' if name else ''}",
        value_format=".1%",
        least_span=0.01,  # smaller differences are noise and should not look like a result
        chosen=(lows.index(best.min_pixels), highs.index(best.max_pixels)),
    )


def _box_plot(result: ResolutionSearch, *, name: str = "") -> Plot:
    whole = _whole_cells(result)
    groups = [(task, [cell.by_task[task] for cell in whole]) for task in result.chosen.by_task]
    chosen = list(result.chosen.by_task.values())
    if len(groups) > 1:
        groups.append(("overall", [cell.score for cell in whole]))
        chosen.append(result.chosen.score)
    describe = f"Scores of each task over the grid{f', {name}' if name else ''}"
    return boxes(groups, marks=chosen, mark_name="chosen", describe=describe)


def _save(plot: Plot, out: Path, name: str) -> list[Path]:
    write_whole(out / f"{name}.png", plot.png())
    write_whole(out / f"{name}.svg", plot.svg())
    return [out / f"{name}.png", out / f"{name}.svg"]
