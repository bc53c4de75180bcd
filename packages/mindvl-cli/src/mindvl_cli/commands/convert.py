# SPDX-License-Identifier: Apache-2.0
"""`mindvl convert`: a mindvl checkpoint to a directory that transformers loads, and such directories to a checkpoint."""

import json
from pathlib import Path
from typing import Any, Literal

import click

from mindvl_cli.progress import reported_progress

DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command(
    epilog="Examples: mindvl convert runs/sft model; "
    "mindvl convert --vision Qwen2.5-VL-72B-Instruct --language Qwen3-8B start"
)
@click.argument("paths", nargs=-1, required=True, metavar="[SOURCE] DESTINATION", type=click.Path(path_type=Path))
@click.option("--to", type=click.Choice(["mindvl", "hf"]), help="Default: whatever SOURCE is not.")
@click.option(
    "--vision", type=DIRECTORY, help="In place of SOURCE: the transformers directory whose vision encoder is taken."
)
@click.option("--language", type=DIRECTORY, help="The same for the language model; the projector starts at random.")
@click.option("--size", help="Named size of the model; default: what the directories' configurations say.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Of what starts at random.", show_default=True)
@click.option(
    "--tokenizer", type=DIRECTORY, help="Default: that of the run, or of the directory; tokens it adds start at random."
)
@click.option("--dtype", type=click.Choice(["fp32", "bf16"]), help="Type of the written weights; default: as they are.")
@click.option("--min-pixels", type=click.IntRange(min=1), help="Smallest image area it takes; default: the run's.")
@click.option("--max-pixels", type=click.IntRange(min=1), help="Largest image area it takes; default: the run's.")
@click.option(
    "--shard-mb", type=click.IntRange(min=1), default=4096, show_default=True, help="Size of a weight file, in MiB."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def convert(
    paths: tuple[Path, ...],
    to: Literal["mindvl", "hf"] | None,
    vision: Path | None,
    language: Path | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Write weights in the other form, one parameter at a time.

    A run directory or a checkpoint becomes a transformers directory. A transformers directory, or the parts of two, becomes a
    checkpoint for init.checkpoint. DESTINATION must not exist.
    """
    low, high = settings["min_pixels"], settings["max_pixels"]
    if low is not None and high is not None and low > high:
        raise click.UsageError(
            f"--min-pixels {low} is above --max-pixels {high}, so no image fits. Swap or change them."
        )
    composed = vision is not None or language is not None
    if len(paths) != (1 if composed else 2):
        raise click.UsageError(
            f"{len(paths)} paths given. Give SOURCE and DESTINATION, or DESTINATION with --vision and --language."
        )
    *sources, destination = paths
    for source in sources:
        if not source.is_dir():
            raise click.UsageError(
                f"{source}: there is no such directory. Name a run, a checkpoint or a model directory."
            )
    found = "mindvl" if composed or (sources[0] / "config.json").is_file() else "hf"
    if to not in (None, found):
        raise click.UsageError(f"--to {to}, but the source is of that form already. Name another source.")
    if found == "hf":
        report = _export(sources[0], destination, settings)
    else:
        report = _import(sources[0] if sources else None, vision, language, destination, settings)
    if as_json:
        click.echo(json.dumps(report))
    else:
        click.echo("\n".join([f"wrote {report['out']}", *_summary(report)]))


def _export(source: Path, destination: Path, settings: dict[str, Any]) -> dict[str, Any]:
    _refuse(settings, "a checkpoint already says what the model is", size=None, seed=0)
    from mindvl_train.checkpoints.export import export_checkpoint

    with reported_progress("convert", unit="parameters") as report:
        export_checkpoint(
            source,
            destination,
            tokenizer=settings["tokenizer"],
            dtype=settings["dtype"],
            min_pixels=settings["min_pixels"],
            max_pixels=settings["max_pixels"],
            shard_bytes=settings["shard_mb"] << 20,
            progress=report,
        )
    return {"out": str(destination)}


def _import(
    model: Path | None, vision: Path | None, language: Path | None, destination: Path, settings: dict[str, Any]
) -> dict[str, Any]:
    _refuse(settings, "they belong to a transformers directory", min_pixels=None, max_pixels=None)
    from mindvl_model import named_config
    from mindvl_train.checkpoints.convert import ConvertSource, convert_to_checkpoint

    with reported_progress("convert", unit="parameters") as report:
        result = convert_to_checkpoint(
            ConvertSource(model=model, vision=vision, language=language),
            destination,
            config=named_config(settings["size"]) if settings["size"] else None,
            tokenizer=settings["tokenizer"],
            dtype=settings["dtype"],
            seed=settings["seed"],
            file_bytes=settings["shard_mb"] << 20,
            progress=report,
        )
    return {
        "out": str(destination),
        "checkpoint": str(result.checkpoint),
        "precision": result.precision,
        "fresh": result.fresh,
        "directories": {str(path): vars(one) for path, one in result.directories.items()},
    }


def _refuse(settings: dict[str, Any], reason: str, **defaults: Any) -> None:
    for name, default in defaults.items():
        if settings[name] != default:
            raise click.UsageError(f"--{name.replace('_', '-')} has no use here: {reason}. Leave it out.")


def _summary(report: dict[str, Any]) -> list[str]:
    """What became of the tensors, in one line for each directory."""
    lines = []
    for directory, one in report.get("directories", {}).items():
        changed = [f"{count} {change}" for change, count in one["converted"].items()]
        lines.append(
            f"{directory}: {len(one['loaded'])} parameters, {one['bytes_read'] / 1e6:.1f} MB read; "
            f"{len(one['reshaped'])} tensors took another form, {len(one['skipped'])} skipped (parts not requested), "
            f"{len(one['redundant'])} redundant{''.join(', ' + text for text in changed)}"
        )
        for name, count in one["untrained_rows"].items():
            lines.append(f"at random: the last {count} rows of {name}, for tokens that {directory} does not have")
    if report.get("fresh"):
        lines.append(f"at random: {len(report['fresh'])} parameters, from {report['fresh'][0]} on")
    return lines
