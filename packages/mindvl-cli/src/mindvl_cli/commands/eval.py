# SPDX-License-Identifier: Apache-2.0
"""`mindvl eval`: score a model directory on benchmarks."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mindvl_cli.commands.options import answering_options, count_option
from mindvl_cli.progress import reported_progress

if TYPE_CHECKING:
    from mindvl_merge.evaluation import Evaluation

JUDGE_NAME = "judgements.jsonl"  # replies of the judge


@click.command(
    "eval", epilog="Example: mindvl eval model --benchmark benchmarks/read.jsonl --out scores --trust-remote-code"
)
@click.argument("model", type=click.Path(path_type=Path))
@answering_options(benchmark="TSV, parquet or JSONL file", out="report, pages and answers")
@count_option("--min-pixels", help="Minimum image area in pixels; default: that of the processor.")
@count_option("--max-pixels", help="Maximum image area in pixels; default: that of the processor.")
@click.option(
    "--endpoint", metavar="URL",
    help="OpenAI-compatible server that runs MODEL, such as http://localhost:8000/v1; default: this process.",
)  # fmt: skip
@click.option(
    "--judge", metavar="URL", help="OpenAI-compatible server of the judge model, for benchmarks that need one."
)
@click.option("--judge-model", help="Name of the judge model at --judge.")
@click.option(
    "--num-workers",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="Maximum number of concurrent requests.",
)
@click.option(
    "--api-key", envvar="OPENAI_API_KEY", help="API key of the servers; default: environment variable OPENAI_API_KEY."
)
def evaluate(
    model: Path,
    paths: tuple[Path, ...],
    kind: str | None,
    compat: str,
    out: Path | None,
    min_pixels: int | None,
    max_pixels: int | None,
    endpoint: str | None,
    judge: str | None,
    judge_model: str | None,
    num_workers: int,
    api_key: str | None,
    device: str,
    batch_size: int,
    max_new_tokens: int,
    trust_remote_code: bool,
    as_json: bool,
) -> None:
    """Score MODEL, an exported model directory or the name of a model at --endpoint, on benchmarks.

    With --out, the same command resumes an interrupted evaluation from its saved answers. Python files of the model
    directory run only with --trust-remote-code: pass it for models that you trust.
    """
    from mindvl_cli.pages.benchmark import CACHE_NAME, REPORT_NAME, write_evaluation
    from mindvl_cli.predictor import DECODER, make_predictor
    from mindvl_merge import evaluation

    benchmarks = [
        benchmark for path in paths for benchmark in evaluation.load_benchmarks(path, kind=kind, compat=compat)
    ]
    for note in (note for benchmark in benchmarks for note in benchmark.notes):
        click.echo(note, err=True)
    config = evaluation.PredictConfig(device=device, batch_size=batch_size, max_new_tokens=max_new_tokens)
    cache = out / CACHE_NAME if out else None
    asked: dict[str, Any] = {"num_workers": num_workers, "api_key": api_key}
    predictor: evaluation.Predictor
    if endpoint:
        at = evaluation.EndpointConfig(url=endpoint, model=str(model), **asked)
        predictor = evaluation.RemotePredictor(at, decoder=DECODER, config=config, cache=cache)
    elif model.is_dir():
        predictor = make_predictor(model, config=config, cache=cache, trust_remote_code=trust_remote_code)
    else:
        raise click.UsageError(f"MODEL: directory {model} does not exist. Give an exported model, or set --endpoint.")
    if bool(judge) != bool(judge_model):
        raise click.UsageError("--judge and --judge-model: are only used together. Give both or none.")
    judging = None
    if judge and judge_model:
        at = evaluation.EndpointConfig(url=judge, model=judge_model, **asked)
        judging = evaluation.endpoint_judge(at, cache=out / JUDGE_NAME if out else None)
    with reported_progress("eval", unit="answers") as report:
        result = evaluation.evaluate(
            predictor,
            benchmarks,
            min_pixels=min_pixels,
            max_pixels=max_pixels,
            compat=compat,
            judge=judging,
            progress=report,
        )
    if out:
        write_evaluation(out, result, benchmarks, predictor)
    if as_json:
        click.echo(json.dumps({"model": str(model), **result.report()}))
        return
    _print_scores(result)
    if out:
        click.echo(f"wrote {out / REPORT_NAME} and {len(benchmarks)} pages", err=True)


def _print_scores(result: "Evaluation") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("task", "score, %", "items")
    for task, score in result.scores.by_task.items():
        table.add_row(task, f"{100 * score.score:.1f}", str(score.num_items))
    table.add_row("overall", f"{100 * result.scores.overall:.1f}", str(len(result.predictions)), style="bold")
    Console(markup=False).print(table)
