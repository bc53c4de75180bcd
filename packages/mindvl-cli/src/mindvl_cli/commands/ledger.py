# SPDX-License-Identifier: Apache-2.0
"""`mindvl data ledger`: show the samples that a run consumed, and verify them against the data order.

A thin layer over mindvl_data.ledger: finds configuration, checkpoint and logs in the directory of a run.
"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mindvl_cli.commands.options import AS_JSON, count_option
from mindvl_cli.failures import CliError
from mindvl_cli.progress import reported_progress

if TYPE_CHECKING:
    from mindvl_data import DataConfig
    from mindvl_data.ledger import TrainingRecords


@click.command(short_help="Show which samples a run consumed.", epilog="Example: mindvl data ledger runs/sft --verify")
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--verify", is_flag=True, help="Compare every logged step with the recomputed data order.")
@click.option(
    "--parent",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Directory of the run whose checkpoint RUN started from; default: the path recorded in RUN.",
)
@count_option("--processes", help="Maximum number of processes for --verify; default: one per core, at most 16.")
@AS_JSON
def ledger(run: Path, verify: bool, parent: Path | None, processes: int | None, as_json: bool) -> None:
    """Show the samples that the run in directory RUN consumed: those it trained on and those it skipped.

    With --verify the exit code is 1 if the log differs from the data order: a sample is missing or repeated, or a
    skipped sample has no recorded cause.
    """
    from mindvl_data import ledger as ledgers

    checkpoint = _newest_checkpoint(run)
    config, global_batch_size = _configuration(run, checkpoint)
    state, training = _records(run, checkpoint)
    audit_log = config.audit_log or run / "audit.jsonl"
    quarantine_log = config.quarantine_log or run / "quarantine.jsonl"
    if verify:
        with reported_progress("verify", unit="steps") as report:
            figures = ledgers.verify(
                config,
                audit_log,
                global_batch_size=global_batch_size,
                state=state,
                quarantine_log=quarantine_log,
                training=training,
                parent_log=None if parent is None else _audit_log_of(parent),
                num_processes=processes,
                progress=report,
            )
    else:
        figures = ledgers.consumed(audit_log, state=state, quarantine_log=quarantine_log, training=training)
    if as_json:
        click.echo(json.dumps(figures))
    else:
        _print(figures)
    if verify and figures["verified"]["num_problems"]:
        sys.exit(1)


def _newest_checkpoint(run: Path) -> Path | None:
    found = sorted((run / "checkpoints").glob("step-" + "[0-9]" * 8))
    return found[-1] if found else None


def _records(run: Path, checkpoint: Path | None) -> "tuple[dict[str, Any] | None, TrainingRecords]":
    """The ledger state of the checkpoint, and the records of the trainer."""
    from mindvl_data.errors import DataError
    from mindvl_data.ledger import TrainingRecords, read_skipped
    from mindvl_data.tracker import check_state

    skipped = read_skipped(run / "skipped.jsonl")
    if checkpoint is None:
        return None, TrainingRecords(skipped=skipped)
    state, manifest = (_read_json(checkpoint / name) for name in ("ledger.json", "manifest.json"))
    try:
        check_state(state, str(checkpoint / "ledger.json"))
    except DataError as error:
        raise CliError(str(error)) from error
    counts = {name: manifest.get(name) for name in ("step", "skipped", "placeholders")}
    for name, count in counts.items():
        if count is not None and type(count) is not int:
            raise CliError(
                f"{checkpoint / 'manifest.json'}: {name} must be an integer, got {count!r:.40}. "
                "Restore the checkpoint from a copy."
            )
    return state, TrainingRecords(
        skipped=skipped, step=counts["step"], num_skipped=counts["skipped"], num_placeholders=counts["placeholders"]
    )


def _read_json(path: Path) -> Any:
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise CliError(
            f"{path}: cannot be read ({error.strerror}). Restore the checkpoint from a copy, or remove its directory."
        ) from error
    except (ValueError, RecursionError) as error:
        raise CliError(
            f"{path}: is not valid JSON ({str(error)[:200]}). Restore the checkpoint from a copy, or remove its directory."
        ) from error
    if not isinstance(document, dict):
        raise CliError(f"{path}: is not a JSON object. Restore the checkpoint from a copy, or remove its directory.")
    return document


def _audit_log_of(run: Path) -> Path:
    return _configuration(run, _newest_checkpoint(run))[0].audit_log or run / "audit.jsonl"


def _configuration(run: Path, checkpoint: Path | None) -> "tuple[DataConfig, int]":
    """The data section and global_batch_size of the run, from its recipe or its newest checkpoint."""
    from mindvl_cli.load import load_section
    from mindvl_data import DataConfig

    if (run / "recipe.yaml").is_file():  # written at every start, so newer than a checkpoint
        file, prefix = run / "recipe.yaml", ""
    elif checkpoint is not None:
        file, prefix = checkpoint / "manifest.json", "run."  # JSON, so YAML too
    else:
        raise CliError(f"{run}: has no recipe.yaml and no checkpoint. Name the `out` directory of a run.")
    return load_section(file, f"{prefix}data", DataConfig), load_section(file, f"{prefix}global_batch_size", int)


def _print(figures: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for name in ("source", "consumed", "trained on", "tokens", "share", "epochs started", "failed"):
        table.add_column(name, justify="left" if name == "source" else "right")
    for name, source in figures["sources"].items():
        share = f"{100 * source['tokens'] / max(1, figures['tokens']):.2f} %"
        counts = (source["samples"], source["trained_on"], source["tokens"])
        table.add_row(
            name, *(f"{c:,}" for c in counts), share, str(source["epochs_begun"]), str(source["failed_samples"])
        )
    when = f", {figures['began']} to {figures['ended']}" if figures["began"] else ""
    console.print(
        f"steps {figures['first_step']:,} to {figures['last_step']:,}{when}: {figures['packs']:,} packs, "
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
    console.print(_about_samples(figures))
    if "verified" in figures:
        _print_verified(console.print, figures)


def _about_checkpoint(figures: dict[str, Any]) -> str:
    if figures["checkpoint_step"] is None:
        return "there is no checkpoint: the run restarts from step 0"
    ahead = figures["steps_after_checkpoint"]
    later = f"; a resumed run repeats the {ahead:,} steps after it" if ahead else ""
    return f"the newest checkpoint is at step {figures['checkpoint_step']:,}{later}"


def _about_samples(figures: dict[str, Any]) -> str:
    ordered = f"in the data order {figures['verified']['samples']:,}, " if "verified" in figures else ""
    causes = ", ".join(f"{count:,} {cause}" for cause, count in figures["skipped"].items() if count)
    skipped = sum(figures["skipped"].values())
    later = figures["after_checkpoint"]
    return (
        f"samples: {ordered}consumed {figures['samples']:,}, trained on {figures['trained_on']:,}, "
        f"skipped {skipped:,}{f' ({causes})' if causes else ''}"
        + (f", after the newest checkpoint {later:,}" if later else "")
    )


def _print_verified(show: Any, figures: dict[str, Any]) -> None:
    verified = figures["verified"]
    for note in verified["notes"]:
        show(f"note: {note}")
    for problem in verified["problems"]:
        show(f"problem: {problem}")
    hidden = verified["num_problems"] - len(verified["problems"])
    if hidden:
        show(f"and {hidden:,} more problems")
    epochs = ", ".join(f"{count} of {name}" for name, count in verified["finished_epochs"].items()) or "none"
    show(f"{verified['steps']:,} of {figures['steps']:,} steps were recomputed; finished epochs: {epochs}")
    skipped = sum(figures["skipped"].values())
    if verified["num_problems"]:
        show(f"verification FAILED: {verified['num_problems']:,} problems")
    elif skipped:
        show(f"verified: no sample is missing or repeated, but {skipped:,} were skipped and not trained on")
    else:
        show("verified: no sample is missing, repeated or skipped")
