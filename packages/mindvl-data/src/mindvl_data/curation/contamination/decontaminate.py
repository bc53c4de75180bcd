# SPDX-License-Identifier: Apache-2.0
"""The step `decontaminate`: drop records that share text or images with benchmarks.

Comes after deduplication. A record matches by text if it has a run of `num_tokens` tokens of one field of a benchmark item
(13, as GPT-3, Brown et al., 2020), so that a question with fewer tokens never matches by its text; runs that more than 10
items share are templates and do not count. It matches by image if the perceptual hashes differ in at most `radius` bits.
Text is normalized as normal_text.py describes. All matches are listed, both sides each, in `contamination-*.jsonl` in
the cache directory of the pipeline.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mindvl_data.curation.contamination.benchmarks import read_benchmark
from mindvl_data.curation.contamination.table import BenchmarkTable, build_table, run_hashes
from mindvl_data.curation.duplicates.perceptual import MAX_RADIUS, image_hash
from mindvl_data.curation.normal_text import tokens
from mindvl_data.curation.record import Record
from mindvl_data.curation.step import Context, Decision, Drop, Signatures, Step, register
from mindvl_data.errors import DataError

# A match of a record; the texts are cut to fit, because signatures have a fixed width.
_MATCH = np.dtype([("is_image", "u1"), ("item", "<u4"), ("amount", "<u4"), ("id", "S256"), ("text", "S480")])
_TEXT_REASON, _IMAGE_REASON = "contaminated_text", "contaminated_image"


@dataclass(frozen=True, kw_only=True)
class Decontaminate:
    """Parameters of `decontaminate`.

    Attributes:
        benchmarks: Benchmark files: .tsv of VLMEvalKit, .parquet, .jsonl, or directories of parquet files.
        match: What is compared.
        num_tokens: Number of consecutive tokens (words, or characters of Chinese) that a record must share.
        method: Perceptual hash of images.
        radius: Maximum number of different bits of 64 between two images.
    """

    benchmarks: tuple[Path, ...]
    match: Literal["text_and_images", "text", "images"] = "text_and_images"
    num_tokens: int = 13
    method: Literal["phash", "dhash"] = "phash"
    radius: int = 4

    def __post_init__(self) -> None:
        if not self.benchmarks:
            raise ValueError("benchmarks: must name at least one file.")
        if self.num_tokens < 1:
            raise ValueError(f"num_tokens: must be at least 1, got {self.num_tokens}.")
        if not 0 <= self.radius <= MAX_RADIUS:
            raise ValueError(f"radius: must be from 0 to {MAX_RADIUS}, got {self.radius}.")


def prepare(config: Decontaminate, context: Context) -> None:
    """Read the benchmarks and store their table in the cache; it is used again until a file changes."""
    path = _table_path(config, context)
    if not path.exists():
        items = (item for benchmark in config.benchmarks for item in read_benchmark(Path(benchmark)))
        build_table(items, num_tokens=config.num_tokens, method=config.method).save(path)


def sign(records: list[Record], config: Decontaminate, context: Context) -> Sequence[NDArray[np.uint8]]:
    """The matches of each record: at most one of its text, and one of its images."""
    path = _table_path(config, context)
    table = context.resource(("benchmarks", path), lambda: BenchmarkTable.load(path))
    found = []
    for record in records:
        matches = [_text_match(record, config, table)] if "text" in config.match else []
        matches += [_image_match(record, config, table)] if "images" in config.match else []
        rows = np.array([match for match in matches if match], _MATCH)
        found.append(rows.view(np.uint8).reshape(len(rows), _MATCH.itemsize))
    return found


def decide(signatures: Signatures, config: Decontaminate, context: Context, directory: Path) -> Iterable[Decision]:
    """Drop every record with a match, and list all matches."""
    table_path = _table_path(config, context)
    table = BenchmarkTable.load(table_path)
    last = None
    with open(table_path.with_suffix(".jsonl"), "w", encoding="utf-8") as file:
        for numbers, pieces, values in signatures.blocks():
            rows = np.ascontiguousarray(values).view(_MATCH)[:, 0]
            for number, piece, row in zip(numbers.tolist(), pieces.tolist(), rows, strict=True):
                line = {"number": number, "piece": piece, **_described(row, table)}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
                if last != (number, piece):
                    yield Decision(number, piece, Drop(line["reason"], f"{line['match']}: {line['benchmark']}"))
                last = number, piece


def _table_path(config: Decontaminate, context: Context) -> Path:
    """The file of the table; its name depends on the parameters and the state of the benchmark files."""
    state: list[Any] = [config.num_tokens, config.method]
    for benchmark in map(Path, config.benchmarks):
        if not benchmark.exists():
            raise DataError(f"steps: decontaminate: the benchmark {benchmark} does not exist. Correct its path.")
        files = sorted(benchmark.rglob("*.parquet")) if benchmark.is_dir() else [benchmark]
        state += [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return context.cache / f"contamination-{blake2b(json.dumps(state).encode(), digest_size=6).hexdigest()}.npz"


def _text_match(record: Record, config: Decontaminate, table: BenchmarkTable) -> tuple[Any, ...] | None:
    best: tuple[int, int, str] | None = None
    for text in record.texts():
        words = tokens(text)
        positions, items = table.find_runs(run_hashes(words, config.num_tokens))
        if not len(positions):
            continue
        numbers, counts = np.unique(items, return_counts=True)
        item = int(numbers[counts.argmax()])
        start = int(positions[items == item][0])
        if best is None or counts.max() > best[1]:
            best = item, int(counts.max()), " ".join(words[start : start + config.num_tokens])
    return best and (0, best[0], best[1], _cut(record.id, 256), _cut(best[2], 480))


def _image_match(record: Record, config: Decontaminate, table: BenchmarkTable) -> tuple[Any, ...] | None:
    best: tuple[int, int, int] | None = None
    for index in range(len(record.media)):
        value = image_hash(record.image(index), config.method)
        found = None if value is None else table.find_image(value, config.radius)
        if found and (best is None or found[1] < best[1]):
            best = *found, index
    return best and (1, best[0], best[1], _cut(record.id, 256), f"image {best[2]}".encode())


def _cut(text: str, num_bytes: int) -> bytes:
    """The text in UTF-8, cut after a whole character."""
    return text.encode()[:num_bytes].decode(errors="ignore").encode()


def _described(row: Any, table: BenchmarkTable) -> dict[str, Any]:
    text, amount, item = row["text"].decode(), int(row["amount"]), int(row["item"])
    match = f"{text}, {amount} different bits" if row["is_image"] else f"{amount} equal runs, first {text!r}"
    return {
        "record": row["id"].decode(),
        "reason": _IMAGE_REASON if row["is_image"] else _TEXT_REASON,
        "match": match,
        "benchmark": table.names[item],
        "benchmark_text": table.excerpts[item],
    }


STEP = register(
    Step(
        name="decontaminate",
        config=Decontaminate,
        summary="Drop records that share a long run of words or an image with benchmark files.",
        reasons={
            _TEXT_REASON: "A run of words is also in a benchmark.",
            _IMAGE_REASON: "An image looks like one of a benchmark.",
        },
        sign=sign,
        decide=decide,
        prepare=prepare,
    )
)
