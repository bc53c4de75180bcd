# SPDX-License-Identifier: Apache-2.0
"""`mindvl demo`: run the whole pipeline on real handwriting, at a size for a laptop."""

from pathlib import Path

import click

from mindvl_cli.extras import require


@click.command(epilog="Example: mindvl demo --quick --out try")
@click.option(
    "--out", default="mindvl-demo", show_default=True, type=click.Path(file_okay=False, path_type=Path),
    help="Directory for data, models and the report.",
)  # fmt: skip
@click.option("--quick", is_flag=True, help="Finish in about a minute; the scores are not meaningful.")
@click.option("--seed", default=0, show_default=True, help="Random seed of images, data order and initial weights.")
@click.option("--fresh", is_flag=True, help="Restart from the beginning instead of resuming.")
@click.option("--json", "as_json", is_flag=True, help="Print report.json instead of text.")
def demo(out: Path, quick: bool, seed: int, fresh: bool, as_json: bool) -> None:
    """Run the whole pipeline on images of handwritten numbers and write a report.

    Trains and merges small models, searches the image size limits, and tests the result. The same command resumes an
    interrupted demo. The report is OUT/report.html.
    """
    require("demo", "mindvl demo")
    import torch

    from mindvl_cli import machine
    from mindvl_cli.demo import settings as sizes
    from mindvl_cli.demo.outcome import gather
    from mindvl_cli.demo.pipeline import DemoRun, run_demo
    from mindvl_cli.demo.report import write_report
    from mindvl_cli.demo.stages import StageBook, fingerprint_of, start_over
    from mindvl_train.metrics.commit import commit

    chosen = sizes.QUICK if quick else sizes.FULL
    torch.set_num_threads(chosen.threads)
    if fresh:
        start_over(out)
    book = StageBook(out, fingerprint_of((chosen, seed, machine.versions(), commit())))
    work = DemoRun(out=out, settings=chosen, seed=seed, book=book)
    results = gather(work, run_demo(work), is_quick=quick)
    page = write_report(results, out)
    if as_json:
        click.echo((out / "report.json").read_text())
        return
    headline = results.headline
    click.echo(f"{headline.title}: {headline.score:.1%} of {headline.num_items}. Report: {page}")
