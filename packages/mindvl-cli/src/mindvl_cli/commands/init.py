# SPDX-License-Identifier: Apache-2.0
"""`mindvl init`: write a first recipe from data and a model directory.

A thin layer over starting_recipe.py, which chooses the values; the data are written and indexed by mindvl-data where they
are not yet.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mindvl_cli.commands.options import OUT_FILE, FiniteRange
from mindvl_cli.failures import CliError
from mindvl_cli.hub import MODEL_DIRECTORY
from mindvl_cli.machine import num_cuda_devices, num_npu_devices
from mindvl_cli.progress import reported_progress
from mindvl_cli.whole_file import write_whole

if TYPE_CHECKING:
    from mindvl_data.shards.index import DirectoryIndex
    from mindvl_data.tokenization import Tokenizer
    from mindvl_model import MindVLConfig


@click.command(
    short_help="Write a recipe from data and a model directory.",
    epilog="Example: mindvl init photos/data.json --model Qwen2.5-VL-3B-Instruct --shards shards/photos --out photos.yaml",
)
@click.argument("data")
@click.option(
    "--model", required=True, type=MODEL_DIRECTORY,
    help="Model directory (transformers format) of MindVL, Qwen2.5-VL or Qwen3-VL, with its tokenizer, or the id of such a "
    "model in the cache of huggingface_hub.",
)  # fmt: skip
@click.option(
    "--out", type=OUT_FILE, default="recipe.yaml", show_default=True, help="New YAML file for the recipe."
)  # fmt: skip
@click.option(
    "--shards",
    type=click.Path(path_type=Path),
    help="New directory for the shards; required unless DATA is a directory of shards.",
)
@click.option(
    "--epochs",
    type=FiniteRange(min=0, min_open=True),
    default=3.0,
    show_default=True,
    help="Passes over the data, which set the number of steps.",
)
def init(data: str, model: Path, out: Path, shards: Path | None, epochs: float) -> None:
    """Write a commented recipe for supervised fine-tuning of a model on DATA.

    DATA is a directory of shards, or a file, a directory or a data set of the Hugging Face hub in a format of `mindvl data
    write`. Shards without an index are indexed; other data is first written as shards into --shards. Up to 4,096 samples are
    measured with the tokenizer of the model; a comment in the recipe gives the measured number for each choice.
    """
    from mindvl_data import load_tokenizer
    from mindvl_data.shards.index import open_index
    from mindvl_model.hf.directory_config import config_from_directory

    if out.exists():
        raise CliError(f"--out: {out} exists. Name another file, or remove it.")
    config = config_from_directory(model)
    if not any((model / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise CliError(f"--model: {model} has no tokenizer.json. Copy the tokenizer files of the model into it.")
    tokenizer = load_tokenizer(model)
    directory = _indexed(data, shards)
    index = open_index(directory)
    if not index.num_samples:
        raise CliError(f"{directory}: the shards have no samples. Specify other data.")
    write_whole(out, _recipe(out, index, tokenizer, model, config, epochs))
    click.echo(f"recipe: {out}. Next: mindvl train {out} --dry-run")


def _indexed(data: str, shards: Path | None) -> Path:
    """The directory of indexed shards; writes and indexes the data where that was not done."""
    from mindvl_data import index_directory, write_shards
    from mindvl_data.formats.hub import PREFIX, open_dataset
    from mindvl_data.formats.recognition import recognize
    from mindvl_data.shards.manifest import MANIFEST_NAME
    from mindvl_data.shards.tar import SHARD_PATTERN

    source: Any = open_dataset(data) if data.startswith(PREFIX) else Path(data)
    directory = Path(data)
    if not directory.is_dir() or not any(directory.glob(SHARD_PATTERN)):
        found, format_name, reason = recognize(getattr(source, "path", source))
        source = replace(source, path=found) if data.startswith(PREFIX) else found
        if shards is None:
            raise CliError(
                f"--shards: is required, because {data} is in the format {format_name} ({reason}). Name a new directory for "
                f"its shards: --shards shards/{directory.stem}."
            )
        click.echo(f"format {format_name}: {reason}", err=True)
        with reported_progress("write", unit="records") as report:
            write_shards(source, shards, format=format_name, progress=report)
        directory = shards
    elif shards is not None:
        raise CliError(f"--shards: {data} already has shards. Remove --shards.")
    if not (directory / MANIFEST_NAME).is_file():
        with reported_progress(f"index {directory.name}", unit="MB", scale=1e6) as report:
            manifest = index_directory(directory, progress=report)
        click.echo(f"{directory}: {manifest['samples']} samples indexed", err=True)
    return directory


def _recipe(
    out: Path, index: "DirectoryIndex", tokenizer: "Tokenizer", model: Path, config: "MindVLConfig", epochs: float
) -> str:
    """Measure the data, choose the values, and return the text of the recipe."""
    from mindvl_cli import starting_recipe as choices
    from mindvl_data import ImageConfig, VideoConfig
    from mindvl_train.preprocessing import preprocessing_of

    facts, directory = choices.model_facts(model), Path(str(index.directory))
    try:
        given = ImageConfig(min_pixels=facts.min_pixels, max_pixels=facts.max_pixels)
        image = given.for_model(preprocessing_of(config.vision))
    except ValueError as error:
        raise CliError(f"--model: the preprocessor of {model} has unusable limits: {error}") from error
    video = VideoConfig().for_model(preprocessing_of(config.vision))
    measured = choices.measure_sample(index, tokenizer, image, video)
    image, image_why = choices.choose_image(facts, image, measured)
    seq_length, length_why = choices.choose_seq_length(facts, measured)
    num_devices = max(1, num_cuda_devices(), num_npu_devices())
    batch, steps, batch_why, steps_why = choices.choose_steps(
        measured, seq_length, epochs=epochs, num_devices=num_devices
    )
    precision, precision_why = choices.choose_precision(facts.dtype)
    every = max(1, -(-steps // choices.CHECKPOINTS))
    name = directory.resolve().name
    values = {
        "phase": "sft",
        "out": Path("runs") / f"{name}-sft",
        "model": {"directory": model},
        "init": {"model": model},
        "data": {
            "sources": [{"name": name, "path": directory, "weight": 1.0}],
            "tokenizer": model,
            "packing": {"seq_length": seq_length},
            "image": {"min_pixels": image.min_pixels, "max_pixels": image.max_pixels},
        },
        "schedule": {"steps": steps, "peak_lr": choices.PEAK_LR, "min_lr": 0.0},
        "global_batch_size": batch,
        "precision": precision,
        "checkpoints": {"every_steps": every, "keep_last": 2},
        "metrics": {"every_steps": min(10, every)},
    }
    comments = {
        "phase": "All parts are trained. Freeze some with, for example, trainable: [projector, language].",
        "out": "Checkpoints, metrics and the resolved recipe.",
        "model": "The architecture and the initial weights.",
        "data.packing.seq_length": length_why,
        "data.image.min_pixels": image_why,
        "schedule.steps": steps_why,
        "schedule.peak_lr": (
            "The value for fine-tuning the 8B model in Table 1 of the paper; linear warm-up over a tenth of the steps, then "
            "cosine decay."
        ),
        "global_batch_size": batch_why,
        "precision": precision_why,
        "checkpoints.every_steps": f"{-(-steps // every)} checkpoints, of which the newest two are kept.",
    }
    nproc = f" --nproc {num_devices}" if num_devices > 1 else ""
    head = (
        f"Supervised fine-tuning of {model} on {directory}, written by mindvl init.\n"
        f"mindvl train {out} --dry-run{nproc}\nmindvl train {out}{nproc}"
    )
    return choices.recipe_text(values, comments, head)
