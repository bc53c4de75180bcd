# SPDX-License-Identifier: Apache-2.0
"""`mindvl data curate`: run a curation pipeline, or explain its steps.

A thin layer over mindvl_data.curation; pages/curation.py draws the page.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mindvl_cli.commands.options import AS_JSON, OVERRIDES
from mindvl_cli.failures import CliError
from mindvl_cli.machine import num_cores
from mindvl_cli.progress import Advance, progress

if TYPE_CHECKING:
    from mindvl_data.curation.pipeline import Curated, Progress

PAGE_NAME = "report.html"


@click.command(short_help="Run a curation pipeline: filter, deduplicate and balance raw data.")
@click.argument("config", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@OVERRIDES
@click.option("--engine", type=click.Choice(["local", "ray"]), default="local", show_default=True,
              help="Engine that runs the steps: processes of this machine, or Ray Data.")  # fmt: skip
@click.option("--workers", type=click.IntRange(min=1), help="Worker processes; default: the number of CPU cores.")
@click.option("--sample", type=click.IntRange(min=1),
              help="Number of records chosen at random from all inputs; the result is written to OUT-sample.")  # fmt: skip
@click.option("--explain", is_flag=True, help="Print the steps with their parameters and reason codes, and exit.")
@click.option("--out", type=click.Path(path_type=Path), help="Output directory, instead of `out` in CONFIG.")
@AS_JSON
def curate(
    config: Path | None,
    overrides: tuple[str, ...],
    engine: str,
    workers: int | None,
    sample: int | None,
    explain: bool,
    out: Path | None,
    as_json: bool,
) -> None:
    """Run the curation pipeline of CONFIG, a YAML file with inputs and steps, and write indexed shards and an HTML report.



    KEY=VALUE overrides one value of the file, with dots between levels: steps.2.threshold=0.8. The same command continues an
    interrupted run. With --explain and no CONFIG, all steps are listed.

    Example: mindvl data curate pairs.yaml --sample 200
    """
    if config is None:
        if not explain:
            raise click.UsageError("CONFIG: is required. Name a YAML file, or list the steps with --explain.")
        _explain_all(as_json)
        return
    from mindvl_cli.curation_file import check_curation, load_curation

    pipeline = load_curation(config, overrides, out)
    if explain:
        from mindvl_cli.curation_text import explain_pipeline

        click.echo(json.dumps(explain_pipeline(pipeline)) if as_json else _text(explain_pipeline(pipeline)))
        return
    check_curation(config, pipeline, overrides)
    from mindvl_cli.pages.curation import write_curation_page
    from mindvl_data.curation.pipeline import curate as run
    from mindvl_data.curation.pipeline import output_directory

    page = output_directory(pipeline, sample) / PAGE_NAME
    with _bars() as report:
        result = run(
            pipeline,
            engine="ray" if engine == "ray" else "local",
            workers=workers or num_cores(),
            sample=sample,
            progress=report,
            write_page=lambda tally, content: write_curation_page(page, tally, content),
        )
    document = {"out": str(result.out), "page": str(page), **result.manifest}
    click.echo(json.dumps(document) if as_json else _summary(result, page))
    if not result.manifest["counts"]["written"]:
        raise CliError(f"{result.out}: no record is left after the last step. The page {page} shows the reasons.")


def _explain_all(as_json: bool) -> None:
    from mindvl_cli.curation_text import explain_steps
    from mindvl_data.curation.step import all_steps

    document = explain_steps([(name, None) for name in all_steps()])
    click.echo(json.dumps(document) if as_json else _text(document))


def _text(document: dict[str, Any]) -> str:
    from mindvl_cli.curation_text import explanation_text

    return explanation_text(document)


def _summary(result: "Curated", page: Path) -> str:
    """Counts per step, and what to do next."""
    content, counts = result.manifest, result.manifest["counts"]
    lines = [f"{'read':<24}{counts['read']:>12,}"]
    for step in content["steps"]:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in step["dropped"].items())
        lines.append(f"{step['step']:<24}{step['out']:>12,}  {reasons}".rstrip())
    if counts["quarantined"]:
        lines.append(f"{'quarantined':<24}{counts['quarantined']:>12,}  see {result.out / 'quarantine.jsonl'}")
    if result.was_finished:
        lines.append(f"{result.out}: the run was finished before; nothing was done.")
    if counts["written"]:
        shards = result.out / "shards"
        lines.append(f"{counts['written']:,} samples in {shards}, indexed for training. Page: {page}")
    return "\n".join(lines)


@contextmanager
def _bars() -> "Iterator[Progress]":
    """A progress bar for each part of the work."""
    with ExitStack() as stack:
        current, before = "", 0.0
        advance: Advance | None = None

        def report(what: str, done: float, total: float, note: str) -> None:
            nonlocal current, before, advance
            if what != current or advance is None:
                stack.close()
                advance = stack.enter_context(progress(what, total=total, unit=_unit(what), done=int(done)))
                current, before = what, int(done)
            advance(done - before, note=note)
            before = done

        yield report


def _unit(what: str) -> str:
    return "samples" if what == "write shards" else "parts" if what.startswith("steps") else ""
