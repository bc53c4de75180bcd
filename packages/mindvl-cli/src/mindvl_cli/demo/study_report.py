# SPDX-License-Identifier: Apache-2.0
"""Write the results of the study: study.json, study.html and the two plots of the paper's Figure 4.

Last step of the study; pages/templates/study.html.j2 is the page.
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mindvl_cli.demo.outcome import this_machine
from mindvl_cli.demo.settings import BLOCK
from mindvl_cli.demo.study import TEST_TASKS, ModelScores, SeedScores
from mindvl_cli.demo.study_findings import comparisons, estimate, findings, landscape
from mindvl_cli.pages.plots import Plot, boxes
from mindvl_cli.pages.render import render
from mindvl_cli.whole_file import write_whole


def write_study(seeds: Sequence[SeedScores], out: Path, *, commit: str, seconds: float) -> Path:
    """Write `study.json`, `study.html` and an SVG file of each plot; returns the path of the page.

    Args:
        seconds: Time of all stages together.
    """
    machine = this_machine()
    document: dict[str, Any] = {
        "findings": findings(seeds),
        "comparisons": [asdict(one) for one in comparisons(seeds)],
        "seeds": [asdict(one) for one in seeds],
        "commit": commit,
        "seconds": seconds,
        "machine": asdict(machine),
    }
    write_whole(out / "study.json", json.dumps(document, indent=1) + "\n")
    drawn = plots(seeds)
    for name, plot in drawn.items():
        write_whole(out / f"{name}.svg", plot.svg())
    page = out / "study.html"
    content = render(
        "study",
        title="mindvl demo --study",
        findings=findings(seeds),
        table=table(seeds),
        compared=compared(seeds),
        plots=list(drawn.values()),
        facts=[
            ("seeds", len(seeds)),
            ("commit", commit or "not a git checkout"),
            ("minutes of all stages", f"{seconds / 60:.0f}"),
            ("system", f"{machine.platform}, {machine.num_cores} cores"),
        ],
    )
    write_whole(page, content)
    return page


def table(seeds: Sequence[SeedScores]) -> list[list[str]]:
    """Rows of Table 6: a model, its mean test score of each task and overall, and the limits that its searches chose."""
    rows = []
    for models in zip(*((*one.parents, one.merged) for one in seeds), strict=True):
        scores = [estimate([model.test[task] for model in models]) for task in TEST_TASKS]
        overall = estimate([model.overall for model in models])
        rows.append([models[0].model, *map(str, scores), str(overall), ", ".join(map(_limits, models))])
    return rows


def compared(seeds: Sequence[SeedScores]) -> list[list[str]]:
    """One row for each comparison of the merged model with its parents."""
    return [
        [
            one.measure,
            str(one.merged),
            *(f"{difference} ({difference.verdict})" for difference in (one.best_parent, one.mean_parent)),
        ]
        for one in comparisons(seeds)
    ]


def plots(seeds: Sequence[SeedScores]) -> dict[str, Plot]:
    """Box plots over the pairs of limits by file name: all image tasks, and documents alone; each cell is a mean over seeds."""
    kinds = {"landscape": ("all image tasks", None), "landscape-document": ("documents", ("document",))}
    found = {}
    for name, (title, tasks) in kinds.items():
        groups = []
        for models in zip(*((*one.parents, one.merged) for one in seeds), strict=True):
            scores = [landscape(model, tasks) if tasks else landscape(model) for model in models]
            groups.append((models[0].model, [statistics.fmean(cell) for cell in zip(*scores, strict=True)]))
        describe = f"Validation scores over all pairs of limits, mean over seeds: {title}"
        found[name] = boxes(groups, stressed=len(groups) - 1, describe=describe)
    return found


def _limits(model: ModelScores) -> str:
    return "-".join(f"{pixels // BLOCK}" for pixels in model.chosen)
