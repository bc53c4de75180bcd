# SPDX-License-Identifier: Apache-2.0
"""`mindvl merge`: average the weights of model directories."""

import json
from pathlib import Path
from typing import Literal

import click

from mindvl_cli.commands.options import RenamedChoice
from mindvl_cli.progress import reported_progress


@click.command(
    epilog="Example: mindvl merge sft-2k sft-4k sft-8k --out merged   or   mindvl merge recipes/tiny/merge.yaml"
)
@click.argument("sources", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option(
    "--out", type=click.Path(path_type=Path), help="New model directory; required unless a merge recipe names it."
)
@click.option("--weights", help="One weight per model, such as 0.5,0.25,0.25; default: equal weights.")
@click.option(
    "--only", multiple=True, help="Name prefix of the tensors to merge; may be repeated. Default: all tensors."
)
@click.option(
    "--dtype",
    type=RenamedChoice(["fp32", "bf16", "fp16"], {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}),
    help="Data type of the merged weights; default: that of the models.",
)
@click.option("--any-weight-sum", is_flag=True, help="Allow weights that do not sum to 1.")
@click.option(
    "--allow-different", multiple=True, metavar="KEY",
    help="Configuration or tokenizer key in which the models may differ; may be repeated.",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Replace an existing --out.")
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as JSON instead of text.")
def merge(
    sources: tuple[Path, ...],
    out: Path | None,
    weights: str | None,
    only: tuple[str, ...],
    dtype: Literal["fp32", "bf16", "fp16"] | None,
    any_weight_sum: bool,
    allow_different: tuple[str, ...],
    force: bool,
    as_json: bool,
) -> None:
    """Average the weights of SOURCES, model directories of one architecture.

    One SOURCE may be a merge recipe instead: a YAML file with all settings. Models are refused if their configurations,
    tokenizers or processors differ in a key that changes the result (such as rope_theta, head counts, token ids). The
    other files of the first model are copied; Python files of a model directory are never run.
    """
    from dataclasses import replace

    from mindvl_cli.load import load_config
    from mindvl_merge import MergeConfig
    from mindvl_merge import merge as merge_directories

    if len(sources) == 1 and sources[0].is_file():
        if out or weights or only or dtype or any_weight_sum or allow_different:
            raise click.UsageError(
                f"{sources[0]}: a merge recipe has all settings. Remove every option except --force and --json."
            )
        config = load_config(sources[0], MergeConfig)
        config = replace(config, overwrite=config.overwrite or force)
    elif out is None:
        raise click.UsageError("--out: is required. Name a new directory.")
    else:
        config = MergeConfig(
            models=sources,
            out=out,
            weights=_parse_weights(weights),
            only=only,
            dtype=dtype,
            any_weight_sum=any_weight_sum,
            allow_different=allow_different,
            overwrite=force,
        )
    with reported_progress("merge", unit="MB", scale=1e6) as report:
        manifest = merge_directories(config, progress=report)
    if as_json:
        click.echo(json.dumps(manifest))
    else:
        click.echo(
            f"{manifest['num_merged']} tensors of {len(config.models)} models averaged into {config.out}", err=True
        )


def _parse_weights(text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise click.BadParameter(
            f"{text!r} is not a list of numbers. Write for example 0.5,0.5.", param_hint="--weights"
        ) from error
