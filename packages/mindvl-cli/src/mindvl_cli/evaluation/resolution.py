# SPDX-License-Identifier: Apache-2.0
"""Search the image size limits at which a model scores best, draw the result, and write it into a processor.

Called by `mindvl search-resolution` and by the demo; joins the evaluation to mindvl_merge's search. Source: the paper's
test-time resolution search and Figure 4.
"""

import json
import shutil
from collections.abc import Hashable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mindvl_cli.evaluation.benchmark import Item
from mindvl_cli.evaluation.predict import Predictor, Progress, Question
from mindvl_cli.evaluation.run import score_prediction
from mindvl_cli.failures import CliError
from mindvl_cli.whole_file import write_whole
from mindvl_merge import Request, ResolutionGrid, ResolutionSearch, box_of, search_resolution

SEARCH_NAME = "resolution.json"


class PredictorScorer:
    """Implements the Scorer of mindvl_merge with a Predictor."""

    def __init__(self, predictor: Predictor, progress: Progress | None = None) -> None:
        self.predictor = predictor
        self.progress = progress

    def resized(self, item: Item, min_pixels: int, max_pixels: int) -> Hashable:
        """Sizes of the item's images after resizing."""
        return self.predictor.sizes(item, min_pixels, max_pixels)

    def score(self, requests: Sequence[Request[Item]]) -> list[float]:
        """Answer and score all requests."""
        questions = [Question(item=r.item, min_pixels=r.min_pixels, max_pixels=r.max_pixels) for r in requests]
        return [score_prediction(p) for p in self.predictor.predict(questions, progress=self.progress)]


def search(
    predictor: Predictor, items: Sequence[Item], grid: ResolutionGrid, *, progress: Progress | None = None
) -> ResolutionSearch:
    """Score every cell of the grid on held-out items, each distinct resize once, and choose one."""
    scorer = PredictorScorer(predictor, progress)
    return search_resolution(scorer, items, grid, tasks=[item.task for item in items])


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
    from mindvl_cli.evaluation.plots import draw_box_plot, draw_heat_map

    out.mkdir(parents=True, exist_ok=True)
    report = out / SEARCH_NAME
    write_whole(report, json.dumps({"model": model, **search_report(result)}, indent=2) + "\n")
    return [report, *draw_heat_map(result, out), *draw_box_plot(result, out)]


def apply_limits(directory: Path, *, min_pixels: int, max_pixels: int, out: Path | None = None) -> Path:
    """Write limits into the processor of a model directory, or of a copy of it.

    Args:
        out: New directory for the copy; None changes `directory` itself.

    Returns:
        The changed processor file.
    """
    if out is not None:
        return _limited_copy(directory, out, min_pixels=min_pixels, max_pixels=max_pixels)
    for name in ("processor_config.json", "preprocessor_config.json"):
        path = directory / name
        if not path.is_file():
            continue
        document = json.loads(path.read_text(encoding="utf-8"))
        holder = document.get("image_processor", document)
        if isinstance(holder, dict) and "size" in holder:
            holder["size"] = {"longest_edge": max_pixels, "shortest_edge": min_pixels}
            for old_name, value in (("min_pixels", min_pixels), ("max_pixels", max_pixels)):
                if old_name in holder:
                    holder[old_name] = value
            write_whole(path, json.dumps(document, indent=2, sort_keys=True) + "\n")
            return path
    raise CliError(f"{directory}: has no image processor with a size. Export the model with its processor.")


def _limited_copy(directory: Path, out: Path, *, min_pixels: int, max_pixels: int) -> Path:
    """Write a copy with these limits atomically."""
    if out.exists():
        raise CliError(f"--copy-to: directory {out} exists. Remove it or choose another directory.")
    unfinished = out.with_name(f"{out.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        shutil.copytree(directory, unfinished)
        changed = apply_limits(unfinished, min_pixels=min_pixels, max_pixels=max_pixels)
        unfinished.rename(out)
    except OSError as error:  # copytree's own error is one, with a list of files
        what = error.strerror or str(error)[:300]
        raise CliError(f"{out}: cannot be written ({what}). Free space or choose another directory.") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return out / changed.name
