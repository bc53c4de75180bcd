# SPDX-License-Identifier: Apache-2.0
"""`mindvl search-resolution`: find the image size limits at which a model scores best on held-out items."""

import json
from pathlib import Path

import click

from mindvl_cli.commands.options import answering_options
from mindvl_cli.extras import require
from mindvl_cli.progress import reported_progress


@click.command(
    "search-resolution",
    epilog='Example: mindvl search-resolution model --benchmark validation --grid "4,16x64,128" --out search --apply',
)
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@answering_options(benchmark="TSV, parquet or JSONL file of validation items", out="scores, plots and answers")
@click.option(
    "--grid",
    "grid_text",
    default="paper",
    show_default=True,
    help="`paper` (24 pairs) or two comma-separated lists, minimums x maximums, in visual tokens of 28x28 pixels: 4,16x64,128.",
)
@click.option("--apply", "apply_here", is_flag=True, help="Write the chosen limits into MODEL's processor.")
@click.option(
    "--copy-to", type=click.Path(path_type=Path), help="New directory for a copy of MODEL with the chosen limits."
)
def search_resolution(
    model: Path,
    paths: tuple[Path, ...],
    kind: str | None,
    compat: str,
    grid_text: str,
    out: Path | None,
    apply_here: bool,
    copy_to: Path | None,
    device: str,
    batch_size: int,
    max_new_tokens: int,
    trust_remote_code: bool,
    as_json: bool,
) -> None:
    """Score MODEL for every pair of minimum and maximum pixels in a grid, and choose the best pair.

    Of pairs with equal scores, the one with the smallest maximum, then the smallest minimum, is chosen. Use held-out
    items that are not part of the final test. Python files of the model directory run only with --trust-remote-code:
    pass it for models that you trust.
    """
    if out:
        require("plots", "mindvl search-resolution --out")
    from mindvl_cli.pages.benchmark import CACHE_NAME
    from mindvl_cli.pages.search import search_report, write_search
    from mindvl_cli.predictor import make_predictor
    from mindvl_cli.processor_limits import apply_limits
    from mindvl_merge.evaluation import PredictConfig, ResolutionGrid, load_benchmarks, search_model

    if apply_here and copy_to:
        raise click.UsageError("--apply: cannot be combined with --copy-to. Remove one of the two.")
    grid = ResolutionGrid.parse(grid_text)
    items = [
        item
        for path in paths
        for benchmark in load_benchmarks(path, kind=kind, compat=compat)
        for item in benchmark.items
    ]
    config = PredictConfig(device=device, batch_size=batch_size, max_new_tokens=max_new_tokens)
    predictor = make_predictor(
        model, config=config, cache=out / CACHE_NAME if out else None, trust_remote_code=trust_remote_code
    )
    with reported_progress("search", unit="answers") as report:
        result = search_model(predictor, items, grid, compat=compat, progress=report)
    if out:
        write_search(result, out, model=str(model))
    chosen = result.chosen
    if apply_here or copy_to:
        limits = {"min_pixels": chosen.min_pixels, "max_pixels": chosen.max_pixels}
        changed = apply_limits(model, **limits, out=copy_to)
        click.echo(f"wrote {changed}", err=True)
    if as_json:
        click.echo(json.dumps({"model": str(model), **search_report(result)}))
        return
    click.echo(
        f"best: min {chosen.min_pixels}, max {chosen.max_pixels} pixels, score {100 * chosen.score:.1f} % "
        f"({result.num_evaluations} evaluations instead of {result.num_requests})"
    )
