# SPDX-License-Identifier: Apache-2.0
"""`mindvl data`: write, index, inspect and count training data.

A thin layer over mindvl-data: options become arguments, results become tables or JSON.
"""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Any

import click

from mindvl_cli.commands.curate import curate
from mindvl_cli.commands.ledger import ledger
from mindvl_cli.commands.options import AS_JSON, OUT_FILE, OVERRIDES, PLOT_FILE, RenamedChoice, count_option
from mindvl_cli.failures import CliError
from mindvl_cli.interrupts import StoppableGroup
from mindvl_cli.media_limits import media_configs
from mindvl_cli.progress import reported_progress
from mindvl_cli.whole_file import write_whole

if TYPE_CHECKING:
    from mindvl_data.preview import Preview

# repeated here, because importing them would load the whole package
FORMAT_NAMES = (
    "auto", "classes", "datasets", "imagefolder", "llava", "messages", "parquet", "table", "text", "tsv", "webdataset",
)  # fmt: skip
EXCLUDED = "excluded.jsonl"
_REASONS_SHOWN = 3
existing = click.Path(exists=True, path_type=Path)
any_path = click.Path(path_type=Path)


@click.group(cls=StoppableGroup)
def data() -> None:
    """Write, curate, index, inspect and count training data."""


data.add_command(curate)
data.add_command(ledger)


@data.command(short_help="Write samples as shards.")
@click.argument("source")
@click.option(
    "--format", "format_name", default="auto", show_default=True,
    type=RenamedChoice(FORMAT_NAMES, {"folder": "imagefolder"}), help="Format of SOURCE; the formats are listed above.",
)  # fmt: skip
@click.option("--out", required=True, type=any_path, help="New directory for the shards.")
@click.option(
    "--image-root",
    type=existing,
    help="Directory that image file names are relative to; default: the directory of SOURCE.",
)
@click.option("--name", help="Source name stored in each sample; default: the directory name of SOURCE.")
@count_option("--samples-per-shard", default=10_000, help="Samples per shard.")
@count_option("--workers", default=4, help="Threads that read and validate samples.")
@click.option("--skip-bad", is_flag=True, help="Skip records that fail to decode; excluded.jsonl lists them.")
@click.option("--fresh", is_flag=True, help="Delete the shards of an unfinished write instead of resuming it.")
@click.option("--allow-pipe", is_flag=True, help="Run the shell commands of pipe: URLs (--format webdataset).")
@click.option(
    "--fetch-urls",
    type=any_path,
    help="Directory for images at http(s) addresses, downloaded once; default: refuse them.",
)
@AS_JSON
def write(
    source: str,
    format_name: str,
    out: Path,
    image_root: Path | None,
    name: str | None,
    samples_per_shard: int,
    workers: int,
    skip_bad: bool,
    fresh: bool,
    allow_pipe: bool,
    fetch_urls: Path | None,
    as_json: bool,
) -> None:
    """Write the samples of SOURCE as shards; images are copied byte for byte.

    SOURCE is a file or directory. hf://datasets/ORG/NAME[@REVISION][/PATH] is a data set of the Hugging Face hub; it is
    downloaded into the cache of huggingface_hub, and manifest.json keeps its revision. With --format webdataset, also any
    URL that webdataset accepts, with braces for several shards: {000..099} expands to 100 shards. The same command resumes an
    interrupted write after its last complete shard.

    \b
    Formats:
      auto         recognized by the files and the first record
      classes      directory with one subdirectory of images for each class
      datasets     directory that the Hugging Face datasets library saved
      imagefolder  directory of images and videos with captions: NAME.txt or captions.jsonl
      llava        LLaVA or ShareGPT conversations, as a JSON list or JSON lines
      messages     OpenAI-style messages, LLaMA-Factory or Alpaca records, as a JSON list or JSON lines
      parquet      Hugging Face dataset: parquet file, a directory of them, or 'DIR/train-*.parquet'
      table        CSV or TSV table of images with captions, or with questions and answers
      text         JSON lines with a field `text`, trained on as a whole
      tsv          VLMEvalKit table: one question per line, images in base64
      webdataset   tar shards that the webdataset library reads

    Example: mindvl data write photos/data.json --out shards/photos
    """
    from mindvl_data import write_shards
    from mindvl_data.formats.hub import PREFIX, open_dataset
    from mindvl_data.formats.recognition import recognize

    read_from: Any = source
    if source.startswith(PREFIX):
        read_from = open_dataset(source)
        source = read_from.path
        click.echo(f"data set {read_from.id}, revision {read_from.revision}", err=True)
    if format_name == "auto":
        found, format_name, reason = recognize(source)
        read_from = found if read_from == source else replace(read_from, path=found)
        click.echo(f"format {format_name}: {reason}", err=True)
    with reported_progress("write", unit="records") as report:
        written = write_shards(
            read_from,
            out,
            format=format_name,
            image_root=image_root,
            source_name=name,
            samples_per_shard=samples_per_shard,
            workers=workers,
            skip_bad=skip_bad,
            fresh=fresh,
            allow_pipe=allow_pipe,
            fetch_urls=fetch_urls,
            progress=report,
        )
    left_out = f"; {written.excluded} records skipped, see {out / EXCLUDED}" if written.excluded else ""
    text = f"{written.samples} samples in {out}{left_out}. Next: mindvl data index {out}"
    _say(as_json, {"out": str(out), "samples": written.samples, "excluded": written.excluded}, text)


@data.command()
@click.argument("directories", nargs=-1, required=True, type=existing)
@click.option("--exclude-bad", is_flag=True, help="Skip samples that fail validation; excluded.jsonl lists them.")
@click.option("--decode", is_flag=True, help="Decode every image and video, to find corrupt pixel data.")
@count_option("--workers", default=1, help="Processes that read shards.")
@click.option("--fresh", is_flag=True, help="Validate all shards, including unchanged ones.")
@click.option(
    "--tokenizer", type=existing, help="Tokenizer directory, to measure text lengths now instead of in the first run."
)
@click.option(
    "--min-pixels",
    type=int,
    help=(
        "Minimum image area in pixels, as in the recipe; coordinates in texts depend on it; requires "
        "--tokenizer. [default: 4 visual tokens]"
    ),
)
@click.option(
    "--max-pixels",
    type=int,
    help=(
        "Maximum image area in pixels, as in the recipe; coordinates in texts depend on it; requires "
        "--tokenizer. [default: 1280 visual tokens]"
    ),
)
@AS_JSON
def index(
    directories: tuple[Path, ...],
    exclude_bad: bool,
    decode: bool,
    workers: int,
    fresh: bool,
    tokenizer: Path | None,
    min_pixels: int | None,
    max_pixels: int | None,
    as_json: bool,
) -> None:
    """Validate the shards in DIRECTORIES and write their index.

    Damaged shards are reported by name. Shards written by other tools are used in place. Unchanged shards are not read
    again.

    Example: mindvl data index shards/photos --workers 8 --tokenizer model/
    """
    from mindvl_data import index_directory, load_tokenizer
    from mindvl_data.config import SampleRules
    from mindvl_data.measure import measure_directory

    rows = []
    for directory in directories:
        with reported_progress(f"index {directory.name}", unit="MB", scale=1e6) as report:
            manifest = index_directory(
                directory, exclude_bad=exclude_bad, decode=decode, workers=workers, fresh=fresh, progress=report
            )
        counts = ("samples", "images", "videos", "bytes", "excluded")
        row: dict[str, Any] = {"directory": str(directory)} | {key: manifest[key] for key in counts}
        if tokenizer is not None:
            image, video = media_configs(tokenizer, min_pixels=min_pixels, max_pixels=max_pixels)
            rules = SampleRules(image=image, video=video)
            with reported_progress(f"measure {directory.name}", unit="shards") as report:
                row["text_tokens"] = measure_directory(directory, load_tokenizer(tokenizer), rules, progress=report)
        rows.append(row)
    _say(as_json, {"directories": rows}, "\n".join(_counted(row) for row in rows))


def _counted(row: dict[str, Any]) -> str:
    videos = f", {row['videos']} videos" if row["videos"] else ""
    path = Path(row["directory"]) / EXCLUDED
    left_out = [f"; skipped: {row['excluded']}, see {path}"] if row["excluded"] else []
    if row["excluded"]:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        reasons = [f"{line['shard']}: {line['reason']}" for line in lines if "shard" in line]
        left_out += [f"\n  {reason}" for reason in reasons[:_REASONS_SHOWN]]
        if len(reasons) > _REASONS_SHOWN:
            left_out.append(f"\n  and {len(reasons) - _REASONS_SHOWN} more")
    return f"{row['directory']}: {row['samples']} samples, {row['images']} images{videos}{''.join(left_out)}"


@data.command()
@click.argument("directory", type=existing)
@click.option("--key", help="Key of the sample; default: the first sample.")
@click.option(
    "--stage", type=click.Choice(["raw", "sample", "tokens", "pack"]), default="sample", show_default=True,
    help="Processing stage to show: raw, the stored record; sample, the parsed messages and media; tokens, the tokens of the "
    "sample; pack, the first packed sequence.",
)  # fmt: skip
@click.option("--out", type=OUT_FILE, help="New HTML file for a page with every stage and the images.")
@click.option("--tokenizer", type=existing, help="Tokenizer directory; required for the stages tokens and pack.")
@click.option(
    "--seq-length", type=int, default=2048, show_default=True,
    help="Sequence length in tokens; longer conversations are truncated.",
)  # fmt: skip
@click.option(
    "--min-pixels",
    type=int,
    help="Minimum image area in pixels; smaller images are enlarged. [default: 4 visual tokens]",
)
@click.option(
    "--max-pixels",
    type=int,
    help="Maximum image area in pixels; larger images are reduced. [default: 1280 visual tokens]",
)
@click.option("--fps", type=float, help="Video frames sampled per second. [default: 2]")
@AS_JSON
def show(
    directory: Path,
    key: str | None,
    stage: str,
    out: Path | None,
    tokenizer: Path | None,
    seq_length: int,
    min_pixels: int | None,
    max_pixels: int | None,
    fps: float | None,
    as_json: bool,
) -> None:
    """Show one sample of an indexed DIRECTORY at one processing stage.

    Example: mindvl data show shards/photos --tokenizer model/ --stage tokens --out sample.html
    """
    from mindvl_cli.pages.sample import sample_page
    from mindvl_data import load_tokenizer, preview
    from mindvl_data.config import SampleRules

    if stage in ("tokens", "pack") and tokenizer is None:
        raise click.UsageError(f"--tokenizer: is required for --stage {stage}. Name a tokenizer directory.")
    image, video = media_configs(tokenizer, min_pixels=min_pixels, max_pixels=max_pixels, fps=fps)
    if stage == "pack":
        page, document = _first_pack(directory, Path(str(tokenizer)), image, video, seq_length)
        text = "\n".join(f"{s['start']:>7} {s['length']:>6}  {s['source']} / {s['key']}" for s in document["segments"])
    else:
        shown = preview.preview_sample(
            directory,
            key=key,
            tokenizer=None if tokenizer is None else load_tokenizer(tokenizer),
            rules=SampleRules(image=image, video=video, max_tokens=seq_length),
        )
        page, document, text = sample_page(shown), shown.as_json(stage), _as_text(shown, stage)
    if out is not None:
        write_whole(out, page)
        text = f"{text}\npage: {out}"
    _say(as_json, document, text)


@data.command(short_help="Report packing and mixture statistics of a recipe.")
@click.argument("recipe", type=existing)
@OVERRIDES
@count_option("--packs", default=1000, help="Packed sequences to build.")
@count_option("--dp", default=8, help="Number of data-parallel ranks for which the load imbalance is computed.")
@count_option(
    "--microbatches", default=8, help="Microbatches per rank and step for which the load imbalance is computed."
)
@click.option("--out", type=PLOT_FILE, help="New HTML file for a page with plots.")
@AS_JSON
def stats(
    recipe: Path,
    overrides: tuple[str, ...],
    packs: int,
    dp: int,
    microbatches: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """Report packing efficiency, visual tokens, load imbalance, source shares and drops for the data of RECIPE.

    KEY=VALUE overrides one value of the recipe, with dots between levels: data.seed=1.

    Example: mindvl data stats recipes/tiny/sft.yaml --packs 2000 --out stats.html data.packing.seq_length=4096
    """
    from mindvl_cli.load import load_section
    from mindvl_cli.pipeline_file import refuse_pipeline
    from mindvl_data import DataConfig
    from mindvl_data.order.stats import order_stats

    refuse_pipeline(recipe)
    config = load_section(recipe, "data", DataConfig, overrides)
    figures = order_stats(config, num_packs=packs, dp_size=dp, microbatches=microbatches)
    if out is not None:
        from mindvl_cli.pages.stats import stats_page

        write_whole(out, stats_page(figures, title=f"Data of {recipe.name}"))
    if as_json:
        click.echo(json.dumps(figures))
        return
    from mindvl_cli.pages.stats_text import print_stats

    print_stats(figures)
    if out is not None:
        click.echo(f"page: {out}")


def _first_pack(
    directory: Path, tokenizer: Path, image: Any, video: Any, seq_length: int
) -> tuple[str, dict[str, Any]]:
    from mindvl_cli.pages.sample import pack_page
    from mindvl_data import DataConfig, Loader, PackingConfig, SourceConfig
    from mindvl_data.tokenization import load_tokenizer

    try:
        packing = PackingConfig(seq_length=seq_length, overflow="trim_turns")
    except ValueError as error:
        raise CliError(f"--seq-length: {str(error).removeprefix('seq_length: ')}") from error
    config = DataConfig(
        sources=(SourceConfig(name=directory.name or "data", path=directory, max_epochs=1),),
        tokenizer=tokenizer,
        packing=packing,
        image=image,
        video=video,
        num_threads=0,
        prefetch_packs=1,
    )
    with Loader(config, global_batch_size=1, position_kind="rope") as loader:
        batch = next(loader, None)
    if batch is None:
        raise CliError(
            f"{directory}: no sample fits into {seq_length} tokens. Raise --seq-length or lower --max-pixels."
        )
    starts = batch.cu_seqlens.tolist()
    segments = [
        {"start": start, "length": s.length, "source": s.source, "key": s.key}
        for start, s in zip(starts, batch.samples, strict=False)
    ]
    patches = len(batch.pixel_values) + len(batch.pixel_values_videos)
    document = {"stage": "pack", "tokens": starts[-1], "patches": patches, "segments": segments}
    return pack_page(batch, load_tokenizer(tokenizer)), document


def _as_text(shown: "Preview", stage: str) -> str:
    head = f"{shown.key} in {shown.shard}"
    sizes = [f"  image {old[1]}x{old[0]} -> {new[1]}x{new[0]}" for old, new in shown.scales]
    if stage == "raw":
        return "\n".join([head, shown.raw.record.decode(), *(f"  {len(m)} bytes" for m in shown.raw.media)])
    if stage == "sample":
        turns: list[tuple[str, Any]] = [(m.role, m.parts) for m in shown.sample.messages] or [
            ("content", shown.sample.content)
        ]
        lines = [f"  {role}: {' '.join(str(part) for part in parts)}" for role, parts in turns]
        return "\n".join([head, *sizes, *lines])
    cut = [f"  truncated: the sample is too long by {shown.num_cut} messages"] if shown.num_cut else []
    # Green on a terminal; listed again below, because a file, or a terminal without colours, does not show it.
    parts = [
        (in_loss, "".join(run.text + (f" x{run.repeats}" if run.repeats > 1 else "") for run in runs))
        for in_loss, runs in itertools.groupby(shown.tokens, key=lambda run: run.in_loss)
    ]
    text = "".join(click.style(part, fg="green") if in_loss else part for in_loss, part in parts)
    listed = [indent(part, "  ") for in_loss, part in parts if in_loss]
    num_loss = sum(run.count for run in shown.tokens if run.in_loss)
    total = sum(run.count for run in shown.tokens)
    counted = f"{num_loss:,} of {total:,} tokens are loss tokens{':' if listed else ''}"
    return "\n".join([head, *sizes, *cut, text.rstrip("\n"), counted, *listed])


def _say(as_json: bool, document: dict[str, Any], text: str) -> None:
    click.echo(json.dumps(document) if as_json else text)
