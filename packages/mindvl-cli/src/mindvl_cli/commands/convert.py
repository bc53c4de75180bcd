# SPDX-License-Identifier: Apache-2.0
"""`mindvl convert`: convert a mindvl checkpoint to a transformers directory, or such directories to a checkpoint."""

import json
from pathlib import Path
from typing import Any, Literal

import click

from mindvl_cli.commands.options import AS_JSON, count_option
from mindvl_cli.hub import MODEL_DIRECTORY, ModelDirectory
from mindvl_cli.progress import reported_progress

_SOURCE = ModelDirectory("a run directory, a checkpoint, a model directory")


@click.command(
    epilog="Example: mindvl convert runs/sft model   or   "
    "mindvl convert --vision Qwen2.5-VL-72B-Instruct --language Qwen3-8B start"
)
@click.argument("paths", nargs=-1, required=True, metavar="[SOURCE] DESTINATION", type=click.Path(path_type=Path))
@click.option(
    "--to",
    type=click.Choice(["mindvl", "hf"]),
    help="Target format (mindvl: checkpoint; hf: transformers directory); default: the format that SOURCE does not have.",
)
@click.option(
    "--vision",
    type=MODEL_DIRECTORY,
    help="Transformers directory that provides the vision encoder, in place of SOURCE.",
)
@click.option(
    "--language",
    type=MODEL_DIRECTORY,
    help="Transformers directory that provides the language model, in place of SOURCE; the projector is initialized randomly.",
)
@click.option("--size", help="Named model size; default: from the config.json files.")
@count_option("--seed", least=0, default=0, help="Random seed of randomly initialized parameters.")
@click.option(
    "--tokenizer",
    type=MODEL_DIRECTORY,
    help="Tokenizer directory; default: that of SOURCE. Embeddings of added tokens are initialized randomly.",
)
@click.option(
    "--dtype", type=click.Choice(["fp32", "bf16"]), help="Data type of the written weights; default: unchanged."
)
@count_option("--min-pixels", help="Minimum image area in pixels; default: that of the run.")
@count_option("--max-pixels", help="Maximum image area in pixels; default: that of the run.")
@count_option("--max-file-mib", default=4096, help="Maximum size of a weight file in MiB.")
@click.option(
    "--merge-adapter",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="PEFT directory whose adapters are folded into the weights of SOURCE, their base model; the result is a transformers "
    "directory.",
)
@AS_JSON
def convert(
    paths: tuple[Path, ...],
    to: Literal["mindvl", "hf"] | None,
    vision: Path | None,
    language: Path | None,
    merge_adapter: Path | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Convert a checkpoint to a transformers directory, or a transformers directory to a checkpoint.

    A checkpoint of adapters becomes a PEFT directory.

    SOURCE is a run directory, a checkpoint, a transformers directory, or the id of a model in the cache of huggingface_hub.
    --vision and --language combine parts of two transformers directories into one checkpoint for init.checkpoint. Weights are
    streamed, one parameter at a time. DESTINATION must not exist.
    """
    low, high = settings["min_pixels"], settings["max_pixels"]
    if low is not None and high is not None and low > high:
        raise click.UsageError(
            f"--min-pixels: {low} is above --max-pixels {high}, so no image fits. Lower it or raise --max-pixels."
        )
    composed = vision is not None or language is not None
    if len(paths) != (1 if composed else 2):
        raise click.UsageError(
            f"SOURCE, DESTINATION: {len(paths)} paths are given. Give SOURCE and DESTINATION, or DESTINATION with --vision "
            "and --language."
        )
    destination = paths[-1]
    # A missing link to the best checkpoint gets the message of the reader of checkpoints.
    sources = [path if path.name == "best" else _SOURCE.convert(path, None, None) for path in paths[:-1]]
    if merge_adapter is not None:
        report = _fold(sources, merge_adapter, destination, settings)
        click.echo(json.dumps(report) if as_json else f"wrote {report['out']}: {report['folded']} tensors changed")
        return
    found = "mindvl" if composed or (sources[0] / "config.json").is_file() else "hf"
    if to not in (None, found):
        raise click.UsageError(f"--to: the source is in the {to} format already. Name another source.")
    if found == "hf":
        report = _export(sources[0], destination, settings)
    else:
        report = _import(sources[0] if sources else None, vision, language, destination, settings)
    if as_json:
        click.echo(json.dumps(report))
    else:
        click.echo("\n".join([f"wrote {report['out']}", *_summary(report)]))


def _fold(sources: list[Path], adapter: Path, destination: Path, settings: dict[str, Any]) -> dict[str, Any]:
    if not sources or not (sources[0] / "config.json").is_file():
        raise click.UsageError(
            "--merge-adapter: SOURCE must be the transformers directory of the base model. Convert a run to a PEFT directory "
            "first: mindvl convert RUN ADAPTER."
        )
    _refuse(settings, "the base model defines it", size=None, seed=0, tokenizer=None, dtype=None)
    _refuse(settings, "the base model defines it", min_pixels=None, max_pixels=None)
    from mindvl_model.adapters.fold import fold_adapter

    with reported_progress("convert", unit="tensors") as report:
        shard_bytes = settings["max_file_mib"] << 20
        folded = fold_adapter(sources[0], adapter, destination, shard_bytes=shard_bytes, progress=report)
    return {"out": str(destination), "folded": folded}


def _export(source: Path, destination: Path, settings: dict[str, Any]) -> dict[str, Any]:
    _refuse(settings, "a checkpoint already defines the model", size=None, seed=0)
    from mindvl_train.checkpoints.export import export_checkpoint

    with reported_progress("convert", unit="parameters") as report:
        export_checkpoint(
            source,
            destination,
            tokenizer=settings["tokenizer"],
            dtype=settings["dtype"],
            min_pixels=settings["min_pixels"],
            max_pixels=settings["max_pixels"],
            shard_bytes=settings["max_file_mib"] << 20,
            progress=report,
        )
    return {"out": str(destination)}


def _import(
    model: Path | None, vision: Path | None, language: Path | None, destination: Path, settings: dict[str, Any]
) -> dict[str, Any]:
    _refuse(settings, "a checkpoint has no image processor", min_pixels=None, max_pixels=None)
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
            file_bytes=settings["max_file_mib"] << 20,
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
            raise click.UsageError(f"--{name.replace('_', '-')}: {reason}. Remove the option.")


def _summary(report: dict[str, Any]) -> list[str]:
    """The use of the tensors, in one line for each directory."""
    lines = []
    for directory, one in report.get("directories", {}).items():
        changed = [f"{count} {change}" for change, count in one["converted"].items()]
        lines.append(
            f"{directory}: {len(one['loaded'])} parameters, {one['bytes_read'] / 1e6:.1f} MB read; "
            f"{len(one['reshaped'])} tensors reshaped, {len(one['skipped'])} skipped (parts not requested), "
            f"{len(one['redundant'])} unused{''.join(', ' + text for text in changed)}"
        )
        for name, count in one["untrained_rows"].items():
            lines.append(
                f"randomly initialized: the last {count} rows of {name}, for tokens that {directory} does not have"
            )
    if report.get("fresh"):
        lines.append(f"randomly initialized: {len(report['fresh'])} parameters, starting with {report['fresh'][0]}")
    return lines
