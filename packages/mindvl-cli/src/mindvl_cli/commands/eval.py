# SPDX-License-Identifier: Apache-2.0
"""`mindvl eval`: score a model folder on benchmarks."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from mindvl_cli.progress import progress


@click.command("eval", epilog="Example: mindvl eval model --benchmark benchmarks/read.jsonl --out scores")
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "-b",
    "--benchmark",
    "paths",
    type=click.Path(exists=True, path_type=Path),
    multiple=True,
    required=True,
    help="A JSONL file, or a folder of them; may be given several times.",
)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder for report, pages and answers.")
@click.option("--min-pixels", type=click.IntRange(min=1), help="Smallest picture area; default: the processor's.")
@click.option("--max-pixels", type=click.IntRange(min=1), help="Largest picture area; default: the processor's.")
@click.option("--device", default="auto", show_default=True, help="Where the model runs, such as cpu or cuda.")
@click.option("--batch-size", type=click.IntRange(min=1), default=64, show_default=True, help="Items answered at once.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=64, show_default=True, help="Longest answer.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def evaluate(
    model: Path,
    paths: tuple[Path, ...],
    out: Path | None,
    min_pixels: int | None,
    max_pixels: int | None,
    device: str,
    batch_size: int,
    max_new_tokens: int,
    as_json: bool,
) -> None:
    """Score MODEL, an exported folder, on benchmarks; a killed run goes on from its answers in --out.

    The folder's own code runs (trust_remote_code): evaluate only models that you trust.
    """
    from mindvl_cli.evaluation import run
    from mindvl_cli.evaluation.benchmark import load_benchmarks
    from mindvl_cli.evaluation.predict import PredictConfig, Predictor

    benchmarks = [benchmark for path in paths for benchmark in load_benchmarks(path)]
    config = PredictConfig(device=device, batch_size=batch_size, max_new_tokens=max_new_tokens)
    predictor = Predictor(model, config=config, cache=out / run.CACHE_NAME if out else None)
    with reported_progress("eval", unit="answers") as report:
        result = run.evaluate(
            predictor, benchmarks, min_pixels=min_pixels, max_pixels=max_pixels, out=out, progress=report
        )
    if as_json:
        click.echo(json.dumps({"model": str(model), **result.report()}))
        return
    _print_scores(result)
    if out:
        click.echo(f"wrote {out / run.REPORT_NAME} and {len(benchmarks)} pages", err=True)


@contextmanager
def reported_progress(label: str, *, unit: str, scale: float = 1) -> Iterator[Callable[[int, int], None]]:
    """A bar that learns its length from the first report of (done, in all); both are divided by `scale` to be shown."""
    from contextlib import ExitStack

    with ExitStack() as stack:
        advance = None
        done_before = 0

        def report(done: int, total: int) -> None:
            nonlocal advance, done_before
            if advance is None:
                advance = stack.enter_context(progress(label, total=total / scale, unit=unit))
            advance((done - done_before) / scale)
            done_before = done

        yield report


def _print_scores(result: "run.Evaluation") -> None:  # type: ignore[name-defined]  # noqa: F821
    from rich.console import Console
    from rich.table import Table

    table = Table("task", "score, %", "items")
    for task, score in result.scores.by_task.items():
        table.add_row(task, f"{100 * score.score:.1f}", str(score.num_items))
    table.add_row("overall", f"{100 * result.scores.overall:.1f}", str(len(result.predictions)), style="bold")
    Console().print(table)
