# SPDX-License-Identifier: Apache-2.0
"""`mindvl paper-table`: show a table of the paper with the scores of evaluated models."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mindvl_cli.commands.options import AS_JSON

if TYPE_CHECKING:
    from mindvl_merge.evaluation.paper import PaperTable


@click.command(
    "paper-table",
    epilog="Example: mindvl paper-table 6 MindVL-8B-2K=scores/sft-2k MindVL-8B-4K=scores/sft-4k MindVL-8B=scores/merged",
)
@click.argument("number", type=click.Choice(["2", "6", "8"]))
@click.argument("runs", nargs=-1, required=True, metavar="[NAME=]DIRECTORY...")
@AS_JSON
def paper_table(number: str, runs: tuple[str, ...], as_json: bool) -> None:
    """Show Table 2, 6 or 8 of the paper with the scores in the --out directories of `mindvl eval`.


    NAME is the row of an evaluation, by default the name of its model. If the paper has a row with this name, the two are
    compared. A dash is shown for a benchmark that was not evaluated, and for the mean of such a row.
    """
    from mindvl_merge.evaluation.paper import paper_table as make_table

    reports = {}
    for text in runs:
        name, equals, directory = text.rpartition("=")
        report = _read(Path(directory))
        name = name if equals else Path(str(report.get("model", directory))).name
        if name in reports:
            raise click.UsageError(f"RUNS: two runs have the name {name!r}. Write NAME=DIRECTORY with different names.")
        reports[name] = report
    table = make_table(int(number), reports)
    rules = {name: str(report.get("compat")) for name, report in reports.items()}
    if as_json:
        click.echo(json.dumps({**asdict(table), "compat": rules}))
    else:
        _print(table, rules)


def _read(directory: Path) -> dict[str, Any]:
    path = directory / "report.json"
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise click.UsageError(
            f"{path}: cannot be read as a report ({error}). Give the directory of `mindvl eval --out`."
        ) from error
    if not isinstance(report, dict):
        raise click.UsageError(f"{path}: is not a report. Give the directory of `mindvl eval --out`.")
    return report


def _print(shown: "PaperTable", rules: dict[str, str]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("model", *shown.columns, title=f"Table {shown.number}")
    for model, row in shown.paper.items():
        table.add_row(f"{model} (paper)", *(f"{score:.1f}" for score in row))
        if model in shown.runs:
            run = shown.runs[model]
            table.add_row(f"{model} (run)", *map(_score, run), style="bold")
            differences = [None if own is None else own - score for own, score in zip(run, row, strict=True)]
            table.add_row("difference", *(_score(one, "+.1f") for one in differences), end_section=True)
    for name, run in shown.runs.items():
        if name not in shown.paper:
            table.add_row(f"{name} (run)", *map(_score, run), style="bold")
    console = Console(markup=False, highlight=False, soft_wrap=True)
    if not console.is_terminal:  # a file has no width
        console.width = max(
            console.width, console.measure(table, options=console.options.update(max_width=500)).maximum
        )
    console.print(table)
    console.print(f"Paper: {shown.source}. {shown.note}")
    for name, benchmarks in shown.benchmarks.items():
        files = ", ".join(benchmarks.values()) or "no benchmark of this table"
        console.print(f"{name}: {files}; rules of {rules[name]}")


def _score(score: float | None, form: str = ".1f") -> str:
    return "-" if score is None else format(score, form)
