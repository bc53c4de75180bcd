# SPDX-License-Identifier: Apache-2.0
"""`mindvl report`: summarize a run as a table, a page or JSON, with the data needed to compare it."""

import json
from pathlib import Path
from typing import Any

import click

from mindvl_cli.commands.options import AS_JSON, PLOT_FILE
from mindvl_cli.whole_file import write_whole


@click.command(epilog="Example: mindvl report runs/sft --out report.html")
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--out", type=PLOT_FILE, help="New HTML file for a page with plots.")
@AS_JSON
def report(run: Path, out: Path | None, as_json: bool) -> None:
    """Summarize the run in directory RUN: loss, throughput, step time by part, configuration.

    The run may still be in progress. docs/reference/metrics.md defines every number.
    """
    from mindvl_cli.run_figures import read_run, run_figures

    record = read_run(run)
    figures = run_figures(record)
    if out is not None:
        from mindvl_cli.pages.run import run_page

        write_whole(out, run_page(record, figures))
    if as_json:
        click.echo(json.dumps(figures))
    else:
        _print(figures, out)


def _print(figures: dict[str, Any], out: Path | None) -> None:
    from rich.console import Console
    from rich.table import Table

    from mindvl_cli.run_figures import gain

    console = Console(highlight=False, markup=False, soft_wrap=True)
    of_steps = "" if figures["steps"] is None else f" of {figures['steps']}"
    loss = "no step was trained" if figures["loss"] is None else f"loss {figures['loss']:.4f}"
    console.print(f"{figures['run']}: {figures['state']}, step {figures['step']}{of_steps}, {loss}")
    for name, group in (("source", figures["loss_by_source"]), ("modality", figures["loss_by_modality"])):
        if group:
            console.print(f"  loss by {name}: " + ", ".join(f"{key} {loss:.4f}" for key, loss in group.items()))
    if figures["validation"] is not None:
        last, best = figures["validation"]["last"], figures["validation"]["best"]
        of_best = "" if best is None else f"; best at step {best['step']}: {best['loss']:.4f}"
        console.print(f"validation at step {last['step']}: loss {last['loss']:.4f}{of_best}")
    speed = f"{figures['tokens_per_s']:,.0f} tokens/s, {figures['seconds_per_step']:.3g} s per step"
    if figures["tflops_per_device"] is not None:
        speed += f", {figures['tflops_per_device']:.3g} TFLOP/s per device"
    if figures["mfu"] is not None:
        speed += f", MFU {100 * figures['mfu']:.1f} %"
    console.print(speed)
    if figures["step_split"]:
        table = Table(box=None, pad_edge=False)
        for name in ("part of a step", "ms", "share", "gain if zero"):
            table.add_column(name, justify="left" if name == "part of a step" else "right")
        for name, part in figures["step_split"].items():
            cells = (f"{1000 * part['seconds']:,.1f}", f"{100 * part['share']:.1f} %", gain(name, part))
            table.add_row(name.replace("_", " "), *cells)
        console.print(table)
    if out is not None:
        console.print(f"page: {out}")
