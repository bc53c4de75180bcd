# SPDX-License-Identifier: Apache-2.0
"""`mindvl search-resolution`: find the image size limits at which models score best on held-out items."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mindvl_cli.commands.options import FiniteRange, answering_options
from mindvl_cli.extras import require
from mindvl_cli.hub import MODEL_DIRECTORY
from mindvl_cli.progress import reported_progress

if TYPE_CHECKING:
    from mindvl_merge.evaluation import Box, ResolutionSearch


@click.command(
    "search-resolution",
    epilog='Example: mindvl search-resolution model --benchmark validation --grid "4,16x64,128" --out search --apply',
)
@click.argument("models", nargs=-1, required=True, type=MODEL_DIRECTORY)
@answering_options(benchmark="TSV, parquet or JSONL file of validation items", out="scores, plots and answers")
@click.option(
    "--grid",
    "grid_text",
    default="paper",
    show_default=True,
    help="`paper` (24 pairs) or two comma-separated lists, minimums x maximums, in visual tokens of the model: 4,16x64,128.",
)
@click.option(
    "--halving", is_flag=True,
    help="Stop half of the pairs after each round of items, to need at most a third of the evaluations.",
)  # fmt: skip
@click.option(
    "--report-share", type=FiniteRange(min=0, max=1, max_open=True), default=0.0, show_default=True,
    help="Share of the items that are not used to choose a pair; the score of the chosen pair is reported on them.",
)  # fmt: skip
@click.option("--per-benchmark", is_flag=True, help="Also print the best pair of each task.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the order and the split of items.")
@click.option("--apply", "apply_here", is_flag=True, help="Write the chosen limits into the processor of each model.")
@click.option(
    "--copy-to", type=click.Path(path_type=Path), help="New directory for a copy of MODEL with the chosen limits."
)
def search_resolution(
    models: tuple[Path, ...],
    paths: tuple[Path, ...],
    kind: str | None,
    compat: str,
    grid_text: str,
    halving: bool,
    report_share: float,
    per_benchmark: bool,
    seed: int,
    out: Path | None,
    apply_here: bool,
    copy_to: Path | None,
    device: str,
    batch_size: int,
    max_new_tokens: int,
    trust_remote_code: bool,
    as_json: bool,
) -> None:
    """Score MODELS for every pair of minimum and maximum pixels in a grid, and choose the best pair of each.

    Of pairs with equal scores, the one with the fewest visual tokens is chosen. Use held-out items that are not part of the
    final test, or --report-share. For several models, a table compares how much the scores vary over the grid. Python files of
    a model directory run only with --trust-remote-code: pass it for models that you trust.
    """
    if out:
        require("plots", "mindvl search-resolution --out")
    from mindvl_cli.pages.benchmark import CACHE_NAME
    from mindvl_cli.pages.search import PAGE_NAME, robustness, search_report, write_page, write_search
    from mindvl_cli.predictor import make_predictor
    from mindvl_cli.processor_limits import apply_limits
    from mindvl_merge.evaluation import PredictConfig, ResolutionGrid, load_benchmarks, search_model

    if apply_here and copy_to:
        raise click.UsageError("--apply: cannot be combined with --copy-to. Remove one of the two.")
    if copy_to and len(models) > 1:
        raise click.UsageError(f"--copy-to: takes one model, got {len(models)}. Use --apply, or give one model.")
    names = {model.name for model in models}
    if out and len(names) < len(models):
        raise click.UsageError("MODELS: two directories have the same name. Give directories with different names.")
    grid = ResolutionGrid.parse(grid_text)
    items = [
        item
        for path in paths
        for benchmark in load_benchmarks(path, kind=kind, compat=compat)
        for item in benchmark.items
    ]
    config = PredictConfig(device=device, batch_size=batch_size, max_new_tokens=max_new_tokens)
    results, reports = {}, []
    for model in models:
        predictor = make_predictor(
            model, config=config, cache=out / CACHE_NAME if out else None, trust_remote_code=trust_remote_code
        )
        with reported_progress(f"search {model.name}" if len(models) > 1 else "search", unit="answers") as report:
            result = search_model(
                predictor, items, grid, compat=compat, halving=halving, report_share=report_share, seed=seed,
                progress=report,
            )  # fmt: skip
        results[str(model)] = result
        reports.append({"model": str(model), **search_report(result)})
        if out:
            write_search(result, out if len(models) == 1 else out / model.name, model=str(model))
        chosen = result.chosen
        if apply_here or copy_to:
            limits = {"min_pixels": chosen.min_pixels, "max_pixels": chosen.max_pixels}
            changed = apply_limits(model, **limits, out=copy_to)
            click.echo(f"wrote {changed}", err=True)
        if not as_json:
            _print_choice(result, f"{model}: " if len(models) > 1 else "", per_benchmark=per_benchmark)
    if out and len(models) > 1:
        write_page(results, out / PAGE_NAME)
    compared = {} if len(models) == 1 else robustness(results)
    if as_json:
        spread = {task: {name: asdict(box) for name, box in boxes.items()} for task, boxes in compared.items()}
        click.echo(json.dumps({"models": reports, "robustness": spread} if compared else reports[0]))
    elif compared:
        _print_robustness(compared)


def _print_choice(result: "ResolutionSearch", start: str, *, per_benchmark: bool) -> None:
    chosen = result.chosen
    click.echo(
        f"{start}best: min {chosen.min_pixels}, max {chosen.max_pixels} pixels, score {100 * chosen.score:.1f} % "
        f"({result.num_evaluations} evaluations instead of {result.num_requests})"
    )
    if chosen.seconds is not None:
        click.echo(f"{start}{chosen.visual_tokens:.0f} visual tokens of an item, {chosen.seconds:.3g} s per answer")
    if per_benchmark:
        for task, cell in result.chosen_by_task.items():
            click.echo(
                f"{start}{task}: min {cell.min_pixels}, max {cell.max_pixels} pixels, "
                f"score {100 * cell.by_task[task]:.1f} %, {result.num_distinct[task]} distinct of {len(result.cells)}"
            )
    if result.holdout:
        found = result.holdout.chosen
        click.echo(
            f"{start}on {result.holdout.num_items} other items: {100 * found.mean:.1f} % "
            f"(95 % confidence interval {100 * found.low:.1f} to {100 * found.high:.1f} %)"
        )


def _print_robustness(compared: "Mapping[str, Mapping[str, Box]]") -> None:
    """Lowest, median and highest score of each model over the grid, by task."""
    from rich.console import Console
    from rich.table import Table

    table = Table("task", "model", "lowest, %", "median, %", "highest, %", "range, points")
    for task, boxes in compared.items():
        for name, box in boxes.items():
            shares = (box.minimum, box.median, box.maximum, box.maximum - box.minimum)
            table.add_row(task, Path(name).name, *(f"{100 * share:.1f}" for share in shares))
    Console(markup=False).print(table)
