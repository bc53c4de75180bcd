# SPDX-License-Identifier: Apache-2.0
"""`mindvl convert`: a mindvl checkpoint to a folder that transformers loads (recipes read such folders in `init`)."""

import json
from pathlib import Path
from typing import Literal

import click


@click.command(epilog="Example: mindvl convert runs/sft model")
@click.argument("source", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("destination", type=click.Path(path_type=Path))
@click.option("--tokenizer", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Default: the run's.")
@click.option("--dtype", type=click.Choice(["fp32", "bf16"]), help="Type of the written weights; default: as they are.")
@click.option("--min-pixels", type=click.IntRange(min=1), help="Smallest picture area it takes; default: the run's.")
@click.option("--max-pixels", type=click.IntRange(min=1), help="Largest picture area it takes; default: the run's.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def convert(
    source: Path,
    destination: Path,
    tokenizer: Path | None,
    dtype: Literal["fp32", "bf16"] | None,
    min_pixels: int | None,
    max_pixels: int | None,
    as_json: bool,
) -> None:
    """Write the newest checkpoint of SOURCE (a run folder or a checkpoint) as a transformers folder DESTINATION."""
    if min_pixels is not None and max_pixels is not None and min_pixels > max_pixels:
        raise click.UsageError(
            f"--min-pixels {min_pixels} is above --max-pixels {max_pixels}, so no picture fits. Swap or change them."
        )
    from mindvl_train.export import export_checkpoint

    export_checkpoint(
        source, destination, tokenizer=tokenizer, dtype=dtype, min_pixels=min_pixels, max_pixels=max_pixels
    )
    if as_json:
        click.echo(json.dumps({"out": str(destination)}))
    else:
        click.echo(f"wrote {destination}")
