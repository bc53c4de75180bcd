# SPDX-License-Identifier: Apache-2.0
"""Write the results of a demo run as report.json, for programs, and report.html, one page that needs no network.

Last step of the demo, after results.py is filled; pages/templates/demo.html.j2 is the page. Every sentence of the page
that judges is derived from the figures in findings.py, also when they contradict the method.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from PIL import Image

from mindvl_cli.demo.findings import clock, findings
from mindvl_cli.demo.results import Results
from mindvl_cli.pages.plots import Plot, boxes, heat_map, line
from mindvl_cli.pages.render import data_url, render
from mindvl_cli.whole_file import write_whole

QUICK_NOTICE = (
    "Quick run: it trains a little to show that every part works, and claims nothing. Figures are not results."
)


def write_report(results: Results, out_dir: Path) -> Path:
    """Write `report.json` and `report.html` into the directory; returns the path of the page.

    In report.json everything outside the keys "timing" and "machine" is equal for two runs with one seed.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    document = json.dumps(report_document(results, out_dir), indent=2, allow_nan=False)
    write_whole(out_dir / "report.json", document + "\n")
    page = out_dir / "report.html"
    write_whole(page, report_page(results))
    return page


def report_document(results: Results, out_dir: Path) -> dict[str, Any]:
    """The results as plain JSON, derived figures included; images are named relative to the report."""
    document: dict[str, Any] = {
        "notice": QUICK_NOTICE if results.is_quick else "",
        "findings": findings(results),
        **dataclasses.asdict(results),
    }
    for row, written in zip(results.table.rows, document["table"]["rows"], strict=True):
        written["overall"] = row.overall
    for example, written in zip(results.examples, document["examples"], strict=True):
        written["images"] = [_relative(image, out_dir) for image in example.images]
    document["timing"]["total_s"] = results.timing.total_s
    return document


def report_page(results: Results) -> str:
    """The page as HTML, with images and styles inside."""
    merged = next((row for row in results.table.rows if row.role == "merged"), None)
    rows = results.table.rows
    return render(
        "demo",
        title="mindvl demo, quick" if results.is_quick else "mindvl demo",
        notice=QUICK_NOTICE if results.is_quick else "",
        r=results,
        merged=merged,
        findings=findings(results),
        clock=clock,
        stage_titles={stage.name: stage.title for stage in results.stages},
        curves=[
            (
                stage,
                line(
                    [(point.step, point.loss) for point in stage.curve],
                    x_label="step",
                    describe=f"loss of {stage.title}",
                ),
            )
            for stage in results.stages
            if stage.curve
        ],
        best=[max(scores) for scores in zip(*(row.scores for row in rows), strict=True)],
        best_overall=max(row.overall for row in rows),
        searches=_searches(results),
        task_titles={task.name: task.title for task in results.table.tasks},
        examples=[(example, [data_url(Image.open(path)) for path in example.images]) for example in results.examples],
        speeds={timing.stage: timing.tokens_per_s for timing in results.timing.stages},
        commands=_commands(results),
    )


def _searches(results: Results) -> list[Plot]:
    """The grid of the merged model, and boxes of all models over the grid."""
    search = results.search
    drawn = [
        heat_map(
            [f"{value:,}" for value in search.min_pixels],
            [f"{value:,}" for value in search.max_pixels],
            model.scores,
            chosen=(
                search.min_pixels.index(search.chosen_min_pixels),
                search.max_pixels.index(search.chosen_max_pixels),
            ),
            row_label="min pixels",
            column_label="max pixels",
            describe="Validation score of the merged model by smallest and largest image size",
            value_format=".1%",
        )
        for model in search.models
        if model.role == "merged"
    ]
    groups = [(one.model, [score for row in one.scores for score in row if score is not None]) for one in search.models]
    merged = [model.role for model in search.models].index("merged") if drawn else -1
    return [*drawn, boxes(groups, stressed=merged, describe="Validation scores of each model over the grid")]


def _commands(results: Results) -> list[tuple[str, str, str]]:
    """What a user would type, in order: (commands, title of the recipe of the last one, that recipe or nothing)."""
    blocks, lines = [], []
    for stage in results.stages:
        if stage.command:
            lines.append(stage.command)
        if stage.recipe:
            blocks.append(("\n".join(lines), stage.title, stage.recipe))
            lines = []
    return [*blocks, ("\n".join(lines), "", "")]


def _relative(image: Path, out_dir: Path) -> str:
    try:
        return image.resolve().relative_to(out_dir.resolve()).as_posix()
    except ValueError:
        return image.name  # an image elsewhere: its place would differ between two runs
