# SPDX-License-Identifier: Apache-2.0
"""`mindvl check packing` and `check parallel`: samples of a packed sequence are isolated from each other, and every
parallel layout gives the same training; checked on the user's own recipe.

A thin layer over mindvl_train.checks; check.py adds both commands to its group.
"""

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mindvl_cli.commands.options import AS_JSON, OVERRIDES, RECIPE, count_option, finite_or_none

if TYPE_CHECKING:
    from mindvl_train.checks.packing import PackingReport
    from mindvl_train.checks.parallel import LayoutReport
    from mindvl_train.config import Precision

DTYPE = click.option(
    "--dtype",
    "precision",
    type=click.Choice(["fp32", "bf16"]),
    default="fp32",
    show_default=True,
    help="Data type of weights and activations; in bf16 the bound is 4 times the difference to fp32 in one process.",
)


@click.command(short_help="Compare parallel layouts of a recipe with one process.")
@RECIPE
@OVERRIDES
@click.option(
    "--layouts",
    metavar="NAME,...",
    help="Parallel layouts, such as dp2,tp2pp2; default: every layout of two processes that the model supports.",
)
@count_option("--steps", default=3, help="Training steps per parallel layout.")
@count_option("--packs", default=4, help="Packed sequences per step.")
@DTYPE
@AS_JSON
@click.pass_context
def parallel(
    ctx: click.Context,
    recipe: Path,
    overrides: tuple[str, ...],
    layouts: str | None,
    steps: int,
    packs: int,
    precision: "Precision",
    as_json: bool,
) -> None:
    """Train RECIPE for a few steps in several parallel layouts and compare each with one process.

    Losses, gradient norms, router loads and token counts of every step, and the gradient of every parameter in the
    first step, must agree to 1e-5 in fp32: numbers relative to those of one process, each gradient relative to its own largest
    absolute value. The exit code is 1 if they do not. Each layout is a run of `mindvl train` in its own
    processes on this machine.

    A layout is `one` (a single process) or a name such as tp2pp2: any of tp, pp, vpp, cp, ep, dp, each followed by
    its size. KEY=VALUE overrides one value of the recipe, with dots between levels: data.seed=1.

    Example: mindvl check parallel recipes/tiny/sft.yaml --layouts dp2,tp2,pp2
    """
    from mindvl_cli.machine import num_cores
    from mindvl_cli.pipeline_file import load_ready
    from mindvl_train.checks.parallel import check_parallel, num_runs, usual_layouts

    config = replace(load_ready(recipe, overrides), global_batch_size=packs)
    names = layouts.split(",") if layouts else usual_layouts(config)
    with _progress_by_layout(num_runs(names, precision)) as (directory, on_layout):
        reports = check_parallel(
            config, names, directory, steps=steps, num_cores=num_cores(), precision=precision, on_layout=on_layout
        )
    holds = all(report.holds for report in reports)
    if as_json:
        click.echo(
            json.dumps({"ok": holds, "recipe": str(recipe), "layouts": [layout_json(report) for report in reports]})
        )
    else:
        click.echo(parallel_text(reports))
    ctx.exit(0 if holds else 1)


@click.command(short_help="Compare a packed sequence with its samples one by one.")
@RECIPE
@OVERRIDES
@click.option(
    "--layouts",
    metavar="NAME,...",
    default="one",
    show_default=True,
    help="Parallel layouts, such as one,pp2,cp2.",
)
@DTYPE
@AS_JSON
@click.pass_context
def packing(
    ctx: click.Context, recipe: Path, overrides: tuple[str, ...], layouts: str, precision: "Precision", as_json: bool
) -> None:
    """Check with the model and data of RECIPE that samples of a packed sequence do not attend to each other.

    Loss and gradients of a packed sequence and of its samples one by one must agree to 1e-5 in fp32 (gradients relative to
    the largest value of the parameter's gradient), and changing one sample must not change the loss of another; the exit
    code is 1 otherwise. As a control, the loss must change when the borders between samples are ignored.

    A layout is `one` (a single process) or a name such as tp2pp2: any of tp, pp, vpp, cp, ep, dp, each followed by
    its size. KEY=VALUE overrides one value of the recipe, with dots between levels: data.seed=1.

    Example: mindvl check packing recipes/tiny/sft.yaml --layouts one,pp2
    """
    from mindvl_cli.machine import num_cores
    from mindvl_cli.pipeline_file import load_ready
    from mindvl_train.checks.packing import check_packing

    config = load_ready(recipe, overrides)
    names = layouts.split(",")
    with _progress_by_layout(len(names)) as (directory, on_layout):
        reports = check_packing(
            config, names, directory, num_cores=num_cores(), precision=precision, on_layout=on_layout
        )
    holds = all(report.holds for report in reports)
    if as_json:
        click.echo(json.dumps({"ok": holds, "recipe": str(recipe), "layouts": [_plain(report) for report in reports]}))
    else:
        click.echo(packing_text(reports))
    ctx.exit(0 if holds else 1)


@contextmanager
def _progress_by_layout(layouts: int) -> Iterator[tuple[Path, Callable[[str], None]]]:
    """A temporary directory, and a callback that takes the name of each layout before it runs."""
    from mindvl_cli.progress import progress

    with (
        tempfile.TemporaryDirectory(prefix="mindvl-check-") as directory,
        progress("compare", total=layouts, unit="layouts") as advance,
    ):
        begun = 0

        def on_layout(name: str) -> None:
            nonlocal begun
            advance(1 if begun else 0, note=name)
            begun += 1

        yield Path(directory), on_layout


def packing_text(reports: "Sequence[PackingReport]") -> str:
    """A table of relative differences, one line per layout, followed by the failures."""
    pack = "{:<12}{:>9}{:>8}{:>8}{:>10}{:>10}{:>11}{:>10}{:>10}  {:<9}{}"
    heads = ("layout", "processes", "samples", "tokens", "loss", "gradient", "neighbour", "poisoned", "control")
    lines = [pack.format(*heads, "verdict", "worst parameter")]
    for one in reports:
        numbers = (one.loss, one.gradient, one.neighbour, one.poisoned, one.control)
        shown = [f"{number:.1e}" if not one.problem else "-" for number in numbers]
        verdict = "failed" if one.problem else "kept" if one.holds else "leaks"
        line = pack.format(one.layout, one.processes, one.samples, one.tokens, *shown, verdict, one.parameter)
        lines.append(line.rstrip())
    return "\n".join([*lines, *_remarks(reports)])


def parallel_text(reports: "Sequence[LayoutReport]") -> str:
    """A table of the worst relative differences, one line per layout, followed by the failures."""
    pack = "{:<12}{:>9}{:>7}{:>10}{:>10}{:>10}{:>10}{:>10}  {:<9}{}"
    heads = ("layout", "processes", "steps", "loss", "norm", "gradient", "router", "figures")
    lines = [pack.format(*heads, "verdict", "worst")]
    for one in reports:
        found = [one.differences.get(column) for column in ("loss", "grad_norm", "gradient", "router", "figures")]
        numbers = [f"{difference.value:.1e}" if difference else "-" for difference in found]
        verdict = "failed" if one.problem else "equal" if one.holds else "differs"
        name = one.worst.name if one.differences else ""
        lines.append(pack.format(one.layout, one.processes, one.steps, *numbers, verdict, name).rstrip())
    return "\n".join([*lines, *_remarks(reports)])


def _remarks(reports: "Sequence[PackingReport | LayoutReport]") -> list[str]:
    """The failure of each layout, and every note once."""
    failed = [f"{one.layout}: {one.problem}" for one in reports if one.problem]
    return failed + [f"note: {note}" for note in dict.fromkeys(one.note for one in reports if one.note)]


def layout_json(report: "LayoutReport") -> dict[str, Any]:
    """A layout as JSON values: the largest difference of each column with its name and bound."""
    return {
        "layout": report.layout,
        "processes": report.processes,
        "steps": report.steps,
        "holds": report.holds,
        "problem": report.problem,
        "note": report.note,
        "differences": {
            column: asdict(found) | {"value": finite_or_none(found.value), "holds": found.holds}
            for column, found in report.differences.items()
        },
    }


def _plain(report: "PackingReport") -> dict[str, Any]:
    """JSON values; None where there is nothing to compare, as JSON has no NaN."""
    values = asdict(report) | {"holds": report.holds}
    return {name: finite_or_none(value) for name, value in values.items()}
