# SPDX-License-Identifier: Apache-2.0
"""`mindvl eval`: score a model directory on benchmarks."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mindvl_cli.commands.options import answering_options, count_option
from mindvl_cli.hub import MODEL_DIRECTORY
from mindvl_cli.progress import reported_progress

if TYPE_CHECKING:
    from mindvl_merge.evaluation import Benchmark, Evaluation, Predictor

JUDGE_NAME = "judgements.jsonl"  # replies of the judge
TASKS_NAME = "lm_eval"  # start of the name of lm-eval's file of answers


@click.command(
    "eval", epilog="Example: mindvl eval model --benchmark benchmarks/read.jsonl --out scores --trust-remote-code"
)
@click.argument("model", type=click.Path(path_type=Path))
@answering_options(benchmark="TSV, parquet or JSONL file", out="report, pages and answers", has_tasks=True)
@count_option("--min-pixels", help="Minimum image area in pixels; default: that of the processor.")
@count_option("--max-pixels", help="Maximum image area in pixels; default: that of the processor.")
@click.option(
    "--endpoint", metavar="URL",
    help="OpenAI-compatible server that runs MODEL, such as http://localhost:8000/v1; default: this process.",
)  # fmt: skip
@click.option(
    "--processor", type=MODEL_DIRECTORY,
    help="Model directory that sets the sizes of images and the unit of coordinates for --endpoint; default: as Qwen2.5-VL.",
)  # fmt: skip
@click.option(
    "--judge", metavar="URL", help="OpenAI-compatible server of the judge model, for benchmarks that need one."
)
@click.option("--judge-model", help="Name of the judge model at --judge.")
@click.option(
    "--baseline", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Replies of the baseline model of Arena-Hard, as a JSONL file of that benchmark.",
)  # fmt: skip
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
    paths: tuple[Path | str, ...],
    kind: str | None,
    compat: str,
    out: Path | None,
    min_pixels: int | None,
    max_pixels: int | None,
    endpoint: str | None,
    processor: Path | None,
    judge: str | None,
    judge_model: str | None,
    baseline: Path | None,
    num_workers: int,
    api_key: str | None,
    device: str,
    batch_size: int,
    max_new_tokens: int,
    trust_remote_code: bool,
    as_json: bool,
) -> None:
    """Score MODEL on benchmarks: a model directory, the id of a model in the cache of huggingface_hub, or a name at --endpoint.

    With --out, the same command resumes an interrupted evaluation from its saved answers. Python files of the model
    directory run only with --trust-remote-code: pass it for models that you trust.
    """
    from mindvl_cli.pages.benchmark import CACHE_NAME, REPORT_NAME, write_evaluation
    from mindvl_merge import evaluation

    tasks = [path.removeprefix(evaluation.PREFIX) for path in paths if isinstance(path, str)]
    if endpoint and tasks:
        raise click.UsageError(
            f"--endpoint: cannot run {evaluation.PREFIX}{tasks[0]}. Give a model directory, or use lm-eval's own command."
        )
    benchmarks = _benchmarks(paths, kind=kind, compat=compat, baseline=baseline)
    config = evaluation.PredictConfig(device=device, batch_size=batch_size, max_new_tokens=max_new_tokens)
    cache = out / CACHE_NAME if out else None
    asked: dict[str, Any] = {"num_workers": num_workers, "api_key": api_key}
    predictor = _predictor(
        model, endpoint, processor, asked, config=config, cache=cache, trust_remote_code=trust_remote_code
    )
    if bool(judge) != bool(judge_model):
        raise click.UsageError("--judge and --judge-model: are only used together. Give both or none.")
    judging = None
    if judge and judge_model:
        judge_at = evaluation.EndpointConfig(url=judge, model=judge_model, **asked)
        judging = evaluation.endpoint_judge(judge_at, cache=out / JUDGE_NAME if out else None)
    result = None
    if benchmarks:
        with reported_progress("eval", unit="answers") as report:
            result = evaluation.evaluate(
                predictor,
                benchmarks,
                min_pixels=min_pixels,
                max_pixels=max_pixels,
                compat=compat,
                judge=judging,
                num_judge_workers=num_workers,
                progress=report,
            )
    kept = out / TASKS_NAME if out else None
    figures = {f"{evaluation.PREFIX}{name}": evaluation.run_tasks(predictor, name, cache=kept) for name in tasks}
    document = {
        "model": str(model),
        **(result.report() if result else {}),
        **({"judge": {"url": judge, "model": judge_model}} if judge else {}),
        **({"lm_eval": figures} if tasks else {}),
    }
    if out:
        write_evaluation(out, document, result, benchmarks, predictor)
    if as_json:
        click.echo(json.dumps(document))
        return
    if result:
        _print_scores(result)
    if tasks:
        _print_tasks(figures)
    if out:
        click.echo(f"wrote {out / REPORT_NAME} and {len(benchmarks)} pages", err=True)


def _benchmarks(paths: tuple[Path | str, ...], **options: Any) -> "list[Benchmark]":
    """The benchmarks of files, with a line about how each was recognized."""
    from mindvl_merge.evaluation import load_benchmarks

    found = [one for path in paths if isinstance(path, Path) for one in load_benchmarks(path, **options)]
    for note in (note for benchmark in found for note in benchmark.notes):
        click.echo(note, err=True)
    return found


def _predictor(
    model: Path, endpoint: str | None, processor: Path | None, asked: dict[str, Any], **settings: Any
) -> "Predictor":
    from mindvl_cli.predictor import DECODER, make_predictor
    from mindvl_merge import evaluation

    if endpoint:
        sizes: dict[str, Any] = {}
        if processor:
            owner = make_predictor(processor, **settings)
            sizes = {"multiple": owner.multiple, "limits": owner.default_limits, "coordinates": owner.coordinates}
        del settings["trust_remote_code"]
        at = evaluation.EndpointConfig(url=endpoint, model=str(model), **asked)
        return evaluation.RemotePredictor(at, decoder=DECODER, **sizes, **settings)
    if processor:
        raise click.UsageError("--processor: is only used with --endpoint. Add --endpoint URL, or remove it.")
    return make_predictor(MODEL_DIRECTORY.convert(model, None, None), **settings)


def _print_scores(result: "Evaluation") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("task", "score, %", "items")
    for task, score in result.scores.by_task.items():
        table.add_row(task, f"{100 * score.score:.1f}", str(score.num_items))
    table.add_row("overall", f"{100 * result.scores.overall:.1f}", str(len(result.predictions)), style="bold")
    Console(markup=False).print(table)
    for name, count in result.failed_judgements.items():
        if count:
            click.echo(f"{name}: {count} items have no valid judgement and score 0", err=True)


def _print_tasks(figures: dict[str, dict[str, dict[str, float]]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("lm-eval task", "metric", "value")
    for task, values in (pair for found in figures.values() for pair in found.items()):
        for name, value in values.items():
            table.add_row(task, name, f"{value:.4g}")
    Console(markup=False).print(table)
