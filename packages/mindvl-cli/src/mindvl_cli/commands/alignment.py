# SPDX-License-Identifier: Apache-2.0
"""`mindvl check alignment`: the same recipe by mindvl and by a plain transformers loop, and the figure of both curves.

Thin: `mindvl_train.checks.alignment` does the work. Joined to the group in check.py.
"""

import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mindvl_cli.commands.options import OUT_FILE

if TYPE_CHECKING:
    from mindvl_train.checks.alignment import AlignmentReport


@click.command(
    short_help="Loss curves against a plain loop over transformers.",
    epilog="Example: mindvl check alignment recipes/tiny/sft.yaml --steps 50 --out curves.svg",
)
@click.argument("recipe", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--steps", type=click.IntRange(min=2), default=50, show_default=True, help="Length of both runs.")
@click.option("--out", type=OUT_FILE, help="SVG file for the figure.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
@click.pass_context
def alignment(
    ctx: click.Context, recipe: Path, overrides: tuple[str, ...], steps: int, out: Path | None, as_json: bool
) -> None:
    """Train RECIPE with mindvl and with a plain loop over transformers; their loss curves must lie on each other.

    Both start from the same weights and see the same batches, in one process (paper, A.2). Exit code 1 if the mean
    relative difference of the losses is above 0.001 (fp32) or 0.01 (bf16). The `out` of the recipe is left alone.
    """
    from mindvl_cli.plan_file import load_ready
    from mindvl_cli.progress import progress
    from mindvl_train.checks.alignment import check_alignment

    config = load_ready(recipe, (*overrides, f"schedule.steps={steps}"))
    with (
        tempfile.TemporaryDirectory(prefix="mindvl-alignment-") as folder,
        progress("train twice", total=2 * steps, unit="steps") as advance,
    ):
        report = check_alignment(config, Path(folder), on_step=lambda done: advance())
    if out is not None:
        _write(out, report)
    click.echo(json.dumps(_plain(report), allow_nan=False) if as_json else _text(report))
    ctx.exit(0 if report.holds else 1)


def _write(out: Path, report: "AlignmentReport") -> None:
    from mindvl_cli.pages.alignment import alignment_svg

    unfinished = out.with_name(f"{out.name}.unfinished")
    unfinished.write_text(alignment_svg(report), encoding="utf-8")
    os.replace(unfinished, out)


def _plain(report: "AlignmentReport") -> dict[str, Any]:
    return {
        "ok": report.holds,
        "phase": report.phase,
        "precision": report.precision,
        "mean_difference": report.mean_difference,
        "bound": report.bound,
        "steps": [asdict(step) | {"difference": step.difference} for step in report.steps],
    }


def _text(report: "AlignmentReport") -> str:
    heads = ("step", "loss", "plain loss", "difference", "grad norm", "plain norm")
    lines = ["{:>6}{:>12}{:>12}{:>12}{:>12}{:>12}".format(*heads)]
    every = max(1, len(report.steps) // 10)
    for step in (*report.steps[:-1:every], report.steps[-1]):
        figures = (step.loss, step.plain_loss, step.difference, step.grad_norm, step.plain_grad_norm)
        lines.append("{:>6}{:>12.5f}{:>12.5f}{:>12.1e}{:>12.4f}{:>12.4f}".format(step.step, *figures))
    verdict = "the curves lie on each other" if report.holds else "the curves part"
    lines.append(f"{verdict}: mean relative difference {report.mean_difference:.1e}, bound {report.bound:g}")
    return "\n".join(lines)
