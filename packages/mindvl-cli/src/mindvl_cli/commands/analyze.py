# SPDX-License-Identifier: Apache-2.0
"""`mindvl analyze`: measure the expert routing of a trained model over data.

A thin layer over mindvl_model.routing: finds model and data, and shows the figures as a table, a page or JSON.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mindvl_cli.commands.options import AS_JSON, PLOT_FILE, count_option
from mindvl_cli.failures import CliError
from mindvl_cli.progress import progress
from mindvl_cli.whole_file import write_whole

if TYPE_CHECKING:
    from mindvl_data import DataConfig
    from mindvl_model import MindVLConfig
    from mindvl_model.routing import RoutingScore


class _Numbers(click.ParamType):
    """Numbers separated by commas; sorted, duplicates removed."""

    name = "N,N,..."

    def __init__(self, kind: type, least: float) -> None:
        self.kind, self.least = kind, least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        try:
            numbers = {self.kind(piece) for piece in str(value).split(",")}
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers. Separate numbers with commas: 16,64,256.", param, ctx)
        if not min(numbers) >= self.least or max(numbers) == float("inf"):
            self.fail(f"{value!r} has a number that is infinite or below {self.least}. Remove it.", param, ctx)
        return tuple(sorted(numbers))


@click.group()
def analyze() -> None:
    """Measure the expert routing of a trained model."""


@analyze.command(
    short_help="Report expert reuse and best cache hit rates.",
    epilog="Example: mindvl analyze routing runs/sft --data recipe.yaml --packs 100 --out routing.html",
)
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--data",
    required=True,
    type=click.Path(exists=True, path_type=Path),
    help="Recipe, or directory of indexed shards.",
)
@click.option(
    "--segment-lengths",
    type=_Numbers(int, 1),
    default="16,64,256",
    show_default=True,
    help="Lengths of the token windows over which SRP and SCH are computed.",
)
@click.option(
    "--cache-sizes", type=_Numbers(float, 0.01), default="1.0,1.5,2", show_default=True,
    help="Cache sizes in multiples of the experts per token.",
)  # fmt: skip
@count_option("--packs", default=32, help="Packed sequences to run.")
@count_option(
    "--seq-length",
    least=8,
    default=4096,
    help="Sequence length in tokens for a directory of shards; a recipe has its own.",
)
@click.option("--out", type=PLOT_FILE, help="New HTML file for a page with curves.")
@AS_JSON
def routing(
    model: Path,
    data: Path,
    segment_lengths: tuple[int, ...],
    cache_sizes: tuple[float, ...],
    packs: int,
    seq_length: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """Measure how well an expert cache would serve MODEL.

    MODEL is the run directory, checkpoint or model directory of a mixture-of-experts model.

    SRP (segment routing best performance) measures how well a fixed group of experts covers each window of tokens; SCH
    (segment cache best hit rate) is the best hit rate of a cache of a given size. Both are reported per token modality
    and source. docs/guides/routing.md defines them.
    """
    from mindvl_data import Loader
    from mindvl_model.routing import analysis_of, run_packs

    config, tokenizer, load = _model(model)
    analysis = analysis_of(config, segment_lengths)
    data_config = _data(data, tokenizer, seq_length)
    with (
        load() as built,
        Loader(
            data_config, global_batch_size=1, position_kind=config.position_kind, vocab_size=config.language.vocab_size
        ) as loader,
        progress("routing", total=packs, unit="packs") as advance,
    ):
        device = next(built.parameters()).device
        batches = (batch.to(device) for batch in islice(loader, packs))
        for _ in run_packs(built, batches, analysis, config.tokens):
            advance()
    scores = analysis.scores(cache_sizes)
    if not scores:
        raise CliError(
            f"{data}: no sample of {analysis.num_packs} packs has {min(segment_lengths)} tokens. "
            "Use shorter --segment-lengths or other data."
        )
    figures: dict[str, Any] = {
        "model": str(model),
        "data": str(data),
        "packs": analysis.num_packs,
        "tokens": analysis.num_tokens,
        "layers": list(analysis.layers),
        "experts": analysis.num_experts,
        "experts_per_token": analysis.experts_per_token,
        "tokens_in_short_samples": {str(length): count for length, count in analysis.tokens_in_short_samples.items()},
        "scores": [asdict(score) for score in scores],
    }
    if out is not None:
        _write_page(out, figures, scores)
    if as_json:
        click.echo(json.dumps(figures))
    else:
        _print(figures, scores, out)


def _model(path: Path) -> "tuple[MindVLConfig, Path | None, Any]":
    """Configuration, tokenizer directory, and a context manager that loads the model inside a process group."""
    from contextlib import contextmanager

    from mindvl_model import set_up_device

    accelerator = set_up_device()
    from mindvl_model import MindVLModel
    from mindvl_model.hf.directory_config import config_from_directory
    from mindvl_model.hf.load import load_hf_directory
    from mindvl_model.megatron.blocks import BuildConfig
    from mindvl_model.megatron.process import single_process
    from mindvl_train.checkpoints.directory import newest_checkpoint, read_manifest
    from mindvl_train.checkpoints.export import model_config
    from mindvl_train.checkpoints.restore import load_weights
    from mindvl_train.resolved_run import DTYPES

    is_directory = (path / "config.json").is_file()
    if is_directory:
        config, tokenizer = config_from_directory(path), path if (path / "tokenizer_config.json").is_file() else None
        dtype = DTYPES["fp32" if accelerator.kind == "cpu" else "bf16"]
    else:
        checkpoint = newest_checkpoint(path)
        manifest = read_manifest(checkpoint)
        config, dtype = model_config(manifest), DTYPES[manifest["run"]["precision"]]
        recorded = manifest["run"]["data"]["tokenizer"]
        tokenizer = Path(recorded) if recorded else None

    @contextmanager
    def load() -> Any:
        with single_process():
            model = MindVLModel(config, BuildConfig(dtype=dtype))
            if is_directory:
                load_hf_directory(model, config, path)
            else:
                load_weights(checkpoint, model)
            yield model.to(accelerator.device()).eval()

    return config, tokenizer, load


def _data(path: Path, tokenizer: Path | None, seq_length: int) -> "DataConfig":
    """The data section of a recipe without its logs, or one source made of a directory of shards."""
    from mindvl_cli.load import load_section
    from mindvl_data import DataConfig, PackingConfig, SourceConfig

    if path.is_file():
        return replace(load_section(path, "data", DataConfig), audit_log=None, quarantine_log=None)
    if tokenizer is None:
        raise CliError(f"{path}: the model directory has no tokenizer. Give a recipe with data.tokenizer as --data.")
    return DataConfig(
        sources=(SourceConfig(name=path.resolve().name, path=path, max_epochs=1),),
        tokenizer=tokenizer,
        packing=PackingConfig(seq_length=seq_length - seq_length % 8),
    )


def _write_page(out: Path, figures: dict[str, Any], scores: "Sequence[RoutingScore]") -> None:
    from mindvl_cli.pages.routing import routing_page

    write_whole(out, routing_page(figures, scores))


def _print(figures: dict[str, Any], scores: "Sequence[RoutingScore]", out: Path | None) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(
        f"{figures['packs']:,} packs, {figures['tokens']:,} tokens; {len(figures['layers'])} layers of "
        f"{figures['experts']} experts, {figures['experts_per_token']} for each token"
    )
    table = Table(box=None, pad_edge=False)
    sizes = [f"SCH {size:g}x" for size in scores[0].cache_sizes]
    for name in ("source", "tokens", "window", "windows", "SRP", "group", *sizes):
        table.add_column(name, justify="left" if name in ("source", "tokens") else "right")
    for score in scores:
        hits = (f"{100 * hit:.1f} %" for hit in score.hit_rates)
        counts = (str(score.segment_length), f"{score.windows:,}", f"{score.srp:.3f}", f"{score.group_size:.2f}x")
        table.add_row(score.source, score.modality, *counts, *hits)
    console.print(table)
    for length, count in figures["tokens_in_short_samples"].items():
        if count:
            console.print(f"{count:,} tokens are in samples shorter than a window of {length}")
    if out is not None:
        console.print(f"page: {out}")
