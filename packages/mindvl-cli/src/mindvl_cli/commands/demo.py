# SPDX-License-Identifier: Apache-2.0
"""`mindvl demo`: run the whole pipeline on real handwriting, at a size for a laptop."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from mindvl_cli.extras import require

if TYPE_CHECKING:
    from mindvl_cli.demo.pipeline import DemoRun


@click.command(epilog="Example: mindvl demo --quick --out try")
@click.option(
    "--out", default="mindvl-demo", show_default=True, type=click.Path(file_okay=False, path_type=Path),
    help="Directory for data, models and the report.",
)  # fmt: skip
@click.option("--quick", is_flag=True, help="Finish in about a minute; the scores are not meaningful.")
@click.option(
    "--study", is_flag=True,
    help="Repeat SFT at three lengths over five seeds, merge, search and compare, in about an hour; not with --quick.",
)  # fmt: skip
@click.option("--seed", default=0, show_default=True, help="Random seed of images, data order and initial weights.")
@click.option("--fresh", is_flag=True, help="Restart from the beginning instead of resuming.")
@click.option("--json", "as_json", is_flag=True, help="Print report.json, or study.json, instead of text.")
def demo(out: Path, quick: bool, study: bool, seed: int, fresh: bool, as_json: bool) -> None:
    """Run the whole pipeline on images of handwritten numbers and write a report.

    Trains and merges small models, searches the image size limits, and tests the result. The same command resumes an
    interrupted demo. The report is OUT/report.html, that of --study OUT/study.html.
    """
    if quick and study:
        raise click.UsageError("--study: cannot be combined with --quick. Remove one of the two.")
    require("demo", "mindvl demo")
    import torch

    from mindvl_cli import machine
    from mindvl_cli.demo import settings as sizes
    from mindvl_cli.demo.outcome import gather
    from mindvl_cli.demo.pipeline import DemoRun, run_demo
    from mindvl_cli.demo.report import write_report
    from mindvl_cli.demo.stages import StageBook, fingerprint_of, start_over
    from mindvl_train.metrics.commit import commit

    chosen = sizes.STUDY if study else sizes.QUICK if quick else sizes.FULL
    torch.set_num_threads(chosen.threads)
    if fresh:
        start_over(out)
    book = StageBook(out, fingerprint_of((chosen, seed, machine.versions(), commit())))
    work = DemoRun(out=out, settings=chosen, seed=seed, book=book)
    if study:
        _study(work, as_json=as_json)
        return
    results = gather(work, run_demo(work), is_quick=quick)
    page = write_report(results, out)
    if as_json:
        click.echo((out / "report.json").read_text())
        return
    headline = results.headline
    click.echo(f"{headline.title}: {headline.score:.1%} of {headline.num_items}. Report: {page}")


def _study(work: "DemoRun", *, as_json: bool) -> None:
    from mindvl_cli.demo.study import run_study
    from mindvl_cli.demo.study_findings import findings
    from mindvl_cli.demo.study_report import write_study
    from mindvl_train.metrics.commit import commit

    seeds = run_study(work)
    page = write_study(seeds, work.out, commit=commit(), seconds=sum(work.book.seconds.values()))
    if as_json:
        click.echo((work.out / "study.json").read_text())
        return
    click.echo("\n".join([*findings(seeds), f"Report: {page}"]))
