# SPDX-License-Identifier: Apache-2.0
"""`mindvl data ledger`: what a run consumed, and the proof that it is what was planned.

Thin: finds configuration, checkpoint and logs in the folder of a run; mindvl_data.ledger does the rest.
"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mindvl_cli.failures import CliError
from mindvl_cli.progress import reported_progress

if TYPE_CHECKING:
    from mindvl_data import DataConfig


@click.command(epilog="Example: mindvl data ledger runs/sft --verify")
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--verify", is_flag=True, help="Plan the run again, and hold every logged step against the plan.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
def ledger(run: Path, verify: bool, as_json: bool) -> None:
    """Show what the training run in the folder RUN consumed: steps, samples and tokens by source, drops, changes.

    With --verify the exit code says whether the log is what the plan says: nothing lost, nothing repeated.
    """
    from mindvl_data import ledger as ledgers

    checkpoint = _newest_checkpoint(run)
    config, packs_per_step = _configuration(run, checkpoint)
    state = None if checkpoint is None else json.loads((checkpoint / "ledger.json").read_text())
    audit_log = config.audit_log or run / "audit.jsonl"
    quarantine_log = config.quarantine_log or run / "quarantine.jsonl"
    if verify:
        with reported_progress("verify", unit="steps") as report:
            figures = ledgers.verify(
                config,
                audit_log,
                packs_per_step=packs_per_step,
                state=state,
                quarantine_log=quarantine_log,
                progress=report,
            )
    else:
        figures = ledgers.consumed(audit_log, state=state, quarantine_log=quarantine_log)
    if as_json:
        click.echo(json.dumps(figures))
    else:
        _print(figures)
    if verify and figures["verified"]["num_problems"]:
        sys.exit(1)


def _newest_checkpoint(run: Path) -> Path | None:
    found = sorted((run / "checkpoints").glob("step-" + "[0-9]" * 8))
    return found[-1] if found else None


def _configuration(run: Path, checkpoint: Path | None) -> "tuple[DataConfig, int]":
    """The data section and packs_per_step the run goes on with: of its recipe, or of its newest checkpoint."""
    from mindvl_cli.load import load_section
    from mindvl_data import DataConfig

    if (run / "recipe.yaml").is_file():  # written at the start of each run, so it knows of changes before a checkpoint
        file, prefix = run / "recipe.yaml", ""
    elif checkpoint is not None:
        file, prefix = checkpoint / "manifest.json", "run."  # JSON, so YAML too
    else:
        raise CliError(f"no recipe.yaml and no checkpoint. {run}. Name the folder that a run was told as `out`.")
    return load_section(file, f"{prefix}data", DataConfig), load_section(file, f"{prefix}packs_per_step", int)


def _print(figures: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for name in ("source", "samples", "tokens", "share", "epochs begun", "bad"):
        table.add_column(name, justify="left" if name == "source" else "right")
    for name, source in figures["sources"].items():
        share = f"{100 * source['tokens'] / max(1, figures['tokens']):.2f} %"
        counts = (source["samples"], source["tokens"])
        table.add_row(name, *(f"{c:,}" for c in counts), share, str(source["epochs_begun"]), str(source["bad_samples"]))
    when = f", {figures['began']} to {figures['ended']}" if figures["began"] else ""
    console.print(
        f"steps {figures['first_step']:,} to {figures['last_step']:,}{when}: {figures['rows']:,} rows, "
        f"{figures['samples']:,} samples, {figures['tokens']:,} tokens"
    )
    console.print(table)
    for reason, count in figures["dropped"].items():
        console.print(f"dropped {count:,} of {reason}")
    for change in figures["changes"]:
        console.print(
            f"after step {change['step']:,} the data of {', '.join(change['sources'])} changed, accepted by "
            f"{change['who']} at {change['when']}"
        )
    console.print(_about_checkpoint(figures))
    if "verified" in figures:
        _print_verified(console.print, figures["verified"])


def _about_checkpoint(figures: dict[str, Any]) -> str:
    if figures["checkpoint_step"] is None:
        return "there is no checkpoint: a new start does all of it again"
    ahead = figures["steps_after_checkpoint"]
    later = f"; the {ahead:,} steps after it are done again when the run is resumed" if ahead else ""
    return f"the newest checkpoint stands at step {figures['checkpoint_step']:,}{later}"


def _print_verified(show: Any, verified: dict[str, Any]) -> None:
    for note in verified["notes"]:
        show(f"note: {note}")
    for problem in verified["problems"]:
        show(f"problem: {problem}")
    hidden = verified["num_problems"] - len(verified["problems"])
    if hidden:
        show(f"and {hidden:,} problems more")
    epochs = ", ".join(f"{count} of {name}" for name, count in verified["finished_epochs"].items()) or "none"
    show(f"{verified['steps']:,} steps were planned again; finished epochs: {epochs}")
    if verified["num_problems"]:
        show(f"NOT as planned: {verified['num_problems']:,} problems")
    else:
        show("as planned: no sample lost, none repeated")
