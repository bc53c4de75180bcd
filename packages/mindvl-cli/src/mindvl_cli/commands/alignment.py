# SPDX-License-Identifier: Apache-2.0
"""`mindvl check alignment`: train a recipe with mindvl and with a plain transformers loop, and plot both loss curves.

A thin layer over `mindvl_train.checks.alignment`; check.py adds it to its group.
"""

import json
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mindvl_cli.commands.options import AS_JSON, OVERRIDES, PLOT_FILE, RECIPE, count_option, finite_or_none
from mindvl_cli.whole_file import write_whole

if TYPE_CHECKING:
    from mindvl_train.checks.alignment import AlignmentReport


@click.command(
    short_help="Compare loss curves with a plain transformers loop.",
    epilog="Example: mindvl check alignment recipes/tiny/sft.yaml --steps 50 --out curves.svg",
)
@RECIPE
@OVERRIDES
@count_option("--steps", least=2, default=50, help="Length of both runs in steps.")
@click.option(
    "--adapter",
    is_flag=True,
    help="Train low-rank adapters, and compare with PEFT; without a section adapter: rank 8 on all linear layers.",
)
@click.option("--out", type=PLOT_FILE, help="New SVG file for the figure of both curves.")
@AS_JSON
@click.pass_context
def alignment(
    ctx: click.Context,
    recipe: Path,
    overrides: tuple[str, ...],
    steps: int,
    adapter: bool,
    out: Path | None,
    as_json: bool,
) -> None:
    """Train RECIPE with mindvl and with a plain transformers loop, and compare losses, norms and parameters.

    Both runs start from the same weights and read the same samples, in one process (paper, A.2); transformers computes
    the position ids itself. In fp32 the bounds of the relative differences are 2e-5 (losses), 1e-4 (gradient norms)
    and 2e-3 (how far training moved each parameter); in bf16 (precision=bf16) they are 4 times the difference between
    the plain loop in bf16 and in fp32. The exit code is 1 if a bound is exceeded. Nothing is written to the `out` of
    the recipe.

    KEY=VALUE overrides one value of the recipe, with dots between levels: data.seed=1.
    """
    from mindvl_cli.pipeline_file import load_ready
    from mindvl_cli.progress import progress
    from mindvl_model.adapters import LoRAConfig
    from mindvl_train.checks.alignment import check_alignment, num_steps

    config = load_ready(recipe, (*overrides, f"schedule.steps={steps}"))
    if adapter and config.adapter is None:
        config = replace(config, adapter=LoRAConfig(rank=8, alpha=16.0))
    with (
        tempfile.TemporaryDirectory(prefix="mindvl-alignment-") as directory,
        progress("train", total=num_steps(config), unit="steps") as advance,
    ):
        report = check_alignment(config, Path(directory), on_step=lambda done: advance())
    if out is not None:
        _write(out, report)
    click.echo(json.dumps(_plain(report), allow_nan=False) if as_json else _text(report))
    ctx.exit(0 if report.holds else 1)


def _write(out: Path, report: "AlignmentReport") -> None:
    from mindvl_cli.pages.alignment import alignment_svg

    write_whole(out, alignment_svg(report))


def _plain(report: "AlignmentReport") -> dict[str, Any]:
    return {
        "ok": report.holds,
        "phase": report.phase,
        "precision": report.precision,
        "mean_difference": finite_or_none(report.mean_difference),
        "bound": report.bound,
        "differences": {name: finite_or_none(value) for name, value in report.differences.items()},
        "bounds": dict(report.bounds),
        "parameter": report.parameter,
        "moved_tokens": report.moved_tokens,
        "note": report.note,
        "steps": [
            {name: finite_or_none(value) for name, value in (asdict(step) | {"difference": step.difference}).items()}
            for step in report.steps
        ],
    }


def _text(report: "AlignmentReport") -> str:
    heads = ("step", "loss", "plain loss", "difference", "grad norm", "plain norm")
    lines = ["{:>6}{:>12}{:>12}{:>12}{:>12}{:>12}".format(*heads)]
    every = max(1, len(report.steps) // 10)
    for step in (*report.steps[:-1:every], report.steps[-1]):
        figures = (step.loss, step.plain_loss, step.difference, step.grad_norm, step.plain_grad_norm)
        lines.append("{:>6}{:>12.5f}{:>12.5f}{:>12.1e}{:>12.4f}{:>12.4f}".format(step.step, *figures))
    names = {"loss": "losses, mean", "grad_norm": "gradient norms, mean", "parameters": "parameters, worst"}
    for name, value in report.differences.items():
        verdict = "DIFFERS" if name in report.beyond else "equal"
        worst = f" ({report.parameter})" if name == "parameters" else ""
        lines.append(f"{names[name]:<21}{value:>9.1e}, bound {report.bounds[name]:.0e}: {verdict}{worst}")
    moved = f"DIFFER at {report.moved_tokens} tokens" if report.moved_tokens else "equal"
    lines.append(f"position ids of transformers and mindvl: {moved}")
    lines.append("mindvl and transformers agree" if report.holds else "mindvl and transformers disagree")
    return "\n".join([*lines, *([f"note: {report.note}"] if report.note else [])])
