# SPDX-License-Identifier: Apache-2.0
"""`mindvl merge`: combine the weights of model directories."""

import glob
import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mindvl_cli.commands.options import TRUST_REMOTE_CODE, RenamedChoice
from mindvl_cli.progress import reported_progress
from mindvl_cli.units import bytes_text, seconds_text

if TYPE_CHECKING:
    from mindvl_merge import MergeConfig

_METHODS = ("average", "task_arithmetic", "slerp", "ties", "dare_linear", "dare_ties")
_LARGE_BYTES = 20_000_000_000  # read and written; below, measuring the disk is not worth the time


@click.command(
    epilog="Examples: mindvl merge sft-2k sft-4k sft-8k --out merged   or   mindvl merge vl language-model --only language "
    "--out merged   or   mindvl merge recipes/tiny/merge.yaml"
)
@click.argument("sources", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option(
    "--out", type=click.Path(path_type=Path), help="New model directory; required unless a merge recipe names it."
)
@click.option("--method", type=click.Choice(_METHODS), default="average", help="Merge method; default: average.")
@click.option(
    "--base", type=click.Path(exists=True, path_type=Path),
    help="Model that SOURCES were trained from; required by all methods except average and slerp.",
)  # fmt: skip
@click.option(
    "--weights", multiple=True,
    help="One weight per model, such as 0.5,0.25,0.25; NAME=0.5,0.5 for one part, prefix or pattern. Default: equal weights, "
    "or 1 each with --base.",
)  # fmt: skip
@click.option("--scale", type=float, default=1.0, help="Factor of the merged difference from --base; default: 1.")
@click.option(
    "--density", type=float, default=0.5, help="Share of each difference that ties and dare keep; default: 0.5."
)
@click.option("--seed", type=int, default=0, help="Seed of the values that dare drops; default: 0.")
@click.option(
    "--only", multiple=True,
    help="Part (vision, projector, language), name prefix or pattern of the tensors to merge; may be repeated. Default: all.",
)  # fmt: skip
@click.option(
    "--match-tokens", is_flag=True,
    help="Match rows of embedding and output layer by token; always done with --only language.",
)  # fmt: skip
@click.option(
    "--allow-missing", multiple=True, metavar="NAME",
    help="Part, prefix or pattern of tensors that only some models have; may be repeated.",
)  # fmt: skip
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
@click.option(
    "--greedy-soup", "soup", multiple=True, type=click.Path(exists=True, path_type=Path), metavar="BENCHMARK",
    help="Benchmark file; models are added to the average one by one and kept if its score does not decrease. May be repeated.",
)  # fmt: skip
@TRUST_REMOTE_CODE
@click.option("--force", is_flag=True, help="Replace an existing --out.")
@click.option("--dry-run", is_flag=True, help="Check the models and print the expected time; write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as JSON instead of text.")
@click.pass_context
def merge(
    context: click.Context,
    sources: tuple[Path, ...],
    out: Path | None,
    weights: tuple[str, ...],
    soup: tuple[Path, ...],
    trust_remote_code: bool,
    force: bool,
    dry_run: bool,
    as_json: bool,
    **values: Any,
) -> None:
    """Merge SOURCES, model directories of one architecture or training runs, into one model directory.

    If all SOURCES are LoRA adapters (PEFT directories or runs), the result is a PEFT directory with their weighted average.
    One SOURCE may be a merge recipe instead: a YAML file with all settings. Models are refused if their configurations,
    tokenizers or processors differ in a key that changes the result (such as rope_theta, head counts, token ids). The
    other files of the first model are copied; Python files of a model directory run only if --greedy-soup is used
    with --trust-remote-code. An interrupted merge continues when the command is repeated.
    """
    from dataclasses import replace

    from mindvl_cli.load import load_config
    from mindvl_merge import MergeConfig, greedy_soup
    from mindvl_merge import merge as merge_directories

    file = next((path for path in sources if path.is_file()), None)
    if file is not None and len(sources) > 1:
        raise click.UsageError(
            f"{file}: is a file between {len(sources)} SOURCES. Give one merge recipe alone, or only directories."
        )
    if file is not None:
        given = [name for name in ("out", "weights", *values) if _is_given(context, name)]
        if given:
            raise click.UsageError(
                f"{file}: a merge recipe has all settings. Remove every option except --force, --dry-run and --json."
            )
        config = load_config(file, MergeConfig)
        config = replace(config, overwrite=config.overwrite or force)
    elif out is None:
        raise click.UsageError("--out: is required. Name a new directory.")
    else:
        whole, parts = _parse_weights(weights)
        config = MergeConfig(models=sources, out=out, weights=whole, part_weights=parts, overwrite=force, **values)
    with _as_directories(config) as converted:
        estimated = _announce(converted, is_always=dry_run)
        if dry_run:
            if as_json:
                click.echo(json.dumps(estimated))
            return
        if soup:
            scored_by = json.dumps([(str(path.resolve()), path.stat().st_mtime_ns) for path in soup])
            score = partial(_score, benchmarks=soup, trust_remote_code=trust_remote_code)
            manifest = greedy_soup(converted, score, scored_by=scored_by, recorded=config)
        else:
            with reported_progress("merge", unit="MB", scale=1e6) as report:
                manifest = merge_directories(converted, progress=report, recorded=config)
    if as_json:
        click.echo(json.dumps(manifest))
    else:
        click.echo(
            f"{manifest['num_merged']} tensors of {len(manifest['models'])} models merged into {config.out} "
            f"({config.method}), {manifest['num_copied']} copied from {config.models[0]}",
            err=True,
        )


@contextmanager
def _as_directories(config: "MergeConfig") -> "Iterator[MergeConfig]":
    """The configuration with training runs and checkpoints replaced by model directories, converted beside the output.

    Converted models are kept until a merge has succeeded, so that the next call for this output uses them.
    """
    from dataclasses import replace

    is_run = {path: not (path / "config.json").exists() and _is_training_run(path) for path in config.parents}
    if not any(is_run.values()):
        yield config
        return
    from mindvl_merge import MergeError
    from mindvl_merge.output_path import check_paths
    from mindvl_merge.publish import partial_directory
    from mindvl_train.checkpoints.export import export_checkpoint

    check_paths(config)  # before hours of conversion
    names = {path: _converted_name(path) for path in config.parents if is_run[path]}
    place, failure = config.out.parent / f"{config.out.name}.converted", None
    with partial_directory(place, keep=tuple(map(glob.escape, names.values())), has_progress=_has_models) as scratch:
        converted = {path: path for path in config.parents} | {path: scratch / name for path, name in names.items()}
        for path in names:
            if not converted[path].exists():
                with reported_progress(f"convert {path.name}", unit="parameters") as report:
                    export_checkpoint(path, converted[path], progress=report)
        base = None if config.base is None else converted[config.base]
        try:
            yield replace(config, models=tuple(converted[path] for path in config.models), base=base)
        except MergeError as error:
            failure = error
        else:
            shutil.rmtree(scratch)
    if failure is not None:
        click.echo(f"{scratch}: has the converted models. The same command uses them; remove it otherwise.", err=True)
        raise failure


def _converted_name(path: Path) -> str:
    """Name of the directory of a converted checkpoint; another checkpoint has another name."""
    from mindvl_train.checkpoints.directory import newest_checkpoint

    checkpoint = newest_checkpoint(path).resolve()
    identity = hashlib.sha256(str(checkpoint).encode() + (checkpoint / "manifest.json").read_bytes()).hexdigest()[:16]
    return f"{path.resolve().name}-{identity}"


def _has_models(scratch: Path) -> bool:
    return any(scratch.glob("*/*config.json"))


def _score(directory: Path, *, benchmarks: tuple[Path, ...], trust_remote_code: bool) -> float:
    """The score of a model directory over the tasks of all benchmarks."""
    from mindvl_cli.predictor import make_predictor
    from mindvl_merge import evaluation

    items = [one for path in benchmarks for one in evaluation.load_benchmarks(path)]
    config = evaluation.PredictConfig()
    predictor = make_predictor(directory, config=config, cache=None, trust_remote_code=trust_remote_code)
    with reported_progress(f"score {directory.name}", unit="answers") as report:
        score = evaluation.evaluate(predictor, items, progress=report).scores.overall
    click.echo(f"{directory}: {100 * score:.2f} %", err=True)
    return score


def _is_training_run(path: Path) -> bool:
    return (path / "checkpoints").is_dir() or (path / "manifest.json").is_file()


def _announce(config: "MergeConfig", *, is_always: bool) -> dict[str, float]:
    """Print the bytes and the expected time of a large merge."""
    from mindvl_merge.estimate import estimate

    found = estimate(config, measure_above_bytes=0 if is_always else _LARGE_BYTES)
    known = found.as_dict()
    read, written = bytes_text(known["read_bytes"]), bytes_text(known["written_bytes"])
    if "seconds" in known:
        minutes = known["seconds"] / 60
        click.echo(
            f"reads {read} at {bytes_text(known['read_bytes_per_s'])}/s, writes {written} at "
            f"{bytes_text(known['written_bytes_per_s'])}/s: about "
            f"{f'{minutes:,.1f} minutes' if minutes >= 1 else seconds_text(known['seconds'])}",
            err=True,
        )
    elif is_always:
        click.echo(f"reads {read}, writes {written}", err=True)
    return known


def _is_given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT


def _parse_weights(texts: tuple[str, ...]) -> tuple[tuple[float, ...] | None, dict[str, tuple[float, ...]]]:
    whole: tuple[float, ...] | None = None
    parts: dict[str, tuple[float, ...]] = {}
    for text in texts:
        name, equals, numbers = text.rpartition("=")
        try:
            values = tuple(float(part) for part in numbers.split(","))
        except ValueError as error:
            raise click.BadParameter(
                f"{text!r} is not a list of numbers. Write for example 0.5,0.5 or language=0.5,0.5.",
                param_hint="--weights",
            ) from error
        if equals:
            parts[name] = values
        elif whole is not None:
            raise click.BadParameter("is given twice without a name. Give it once.", param_hint="--weights")
        else:
            whole = values
    return whole, parts
