# SPDX-License-Identifier: Apache-2.0
"""Split the inputs of a pipeline into parts: a tar shard, a row group, or a number of lines or files.

First step of a run; reading.py reads a part. The parts depend on the inputs only, in a stable order. A part is the unit
of restarts and of parallel work; its number is in the high 32 bits of the numbers of its records.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mindvl_data.curation.config import InputConfig
from mindvl_data.curation.extras import require
from mindvl_data.errors import DataError, redact
from mindvl_data.formats.imagefolder import CAPTIONS_NAME
from mindvl_data.formats.webdataset import shard_urls
from mindvl_data.shards.tar import MEDIA_EXTENSIONS, SHARD_PATTERN

LINES_PER_PART = 10_000
BYTES_PER_PART = 64 << 20  # of JSON lines
IMAGES_PER_PART = 1_000
DOCUMENTS_PER_PART = 16
SAMPLED_PARTS = 16  # of one input, with `--sample`

_BLOCK = 1 << 23


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of an input.

    Attributes:
        number: Position among the parts of all inputs.
        input: Index of the input.
        files: Files of `imagefolder` and `pdf`, otherwise the one file or address.
        start, stop: Bytes of JSON lines, or row groups of a parquet file.
        first_row: Records of the file before this part.
        records: Number of records, for progress; 0 if unknown.
        take: Number of records to choose at random; None: all.
    """

    number: int
    input: int
    files: tuple[str, ...]
    start: int = 0
    stop: int = 0
    first_row: int = 0
    records: int = 0
    take: int | None = None


@dataclass(frozen=True, kw_only=True)
class InputFiles:
    """The identity of an input: its files with their sizes and times, as a digest."""

    files: int
    num_bytes: int  # of local files
    digest: str


def split_inputs(inputs: Sequence[InputConfig]) -> tuple[list[Part], list[InputFiles]]:
    """The parts of all inputs, and the identity of each input.

    Raises:
        DataError: A file is missing or of another format, or a library for the format is not installed.
    """
    parts: list[Part] = []
    identities: list[InputFiles] = []
    for index, config in enumerate(inputs):
        found = list(_SPLITTERS[config.format](config))
        if not found:
            raise DataError(f"{redact(config.path)}: the input has no records. Remove it, or specify another path.")
        parts += [replace(part, number=len(parts) + i, input=index) for i, part in enumerate(found)]
        identities.append(_identity(found))
    return parts, identities


def sample_parts(parts: Sequence[Part], num_records: int, seed: int) -> list[Part]:
    """A random choice of parts over all inputs that together give about `num_records` records.

    Each input gives the same number of records. The choice depends on the parts and the seed only.
    """
    by_input: dict[int, list[Part]] = {}
    for part in parts:
        by_input.setdefault(part.input, []).append(part)
    chosen: list[Part] = []
    for position, group in enumerate(by_input.values()):
        share = num_records * (position + 1) // len(by_input) - num_records * position // len(by_input)
        generator = np.random.default_rng([seed, position])
        picked = sorted(generator.permutation(len(group))[: min(SAMPLED_PARTS, max(1, share))].tolist())
        for rank, place in enumerate(picked):
            take = share * (rank + 1) // len(picked) - share * rank // len(picked)
            if take:
                chosen.append(replace(group[place], take=take, records=take))
    return chosen


def _identity(parts: Sequence[Part]) -> InputFiles:
    digest, files, total = hashlib.sha256(), dict.fromkeys(file for part in parts for file in part.files), 0
    for file in files:
        try:
            status = os.stat(file.removeprefix("file:"))
        except OSError:  # an address, perhaps longer than a file name may be
            status = None
        total += status.st_size if status else 0
        stamp = (status.st_size, status.st_mtime_ns) if status else None
        digest.update(f"{file}\0{stamp}\n".encode("utf-8", "surrogatepass"))
    return InputFiles(files=len(files), num_bytes=total, digest=digest.hexdigest()[:32])


def _part(*files: str, **fields: Any) -> Part:
    return Part(number=0, input=0, files=files, **fields)


def _shards(config: InputConfig) -> Iterator[Part]:
    path = Path(config.path)
    files = sorted(path.glob(SHARD_PATTERN)) if path.is_dir() else [path]
    if not files or not path.exists():
        raise DataError(f"{config.path}: the directory has no {SHARD_PATTERN}. Specify a directory of shards.")
    require("webdataset", extra="webdataset", where=config.path)
    yield from (_part(str(file)) for file in files)


def _tars(config: InputConfig) -> Iterator[Part]:
    require("webdataset", extra="webdataset", where=config.path)
    for url in shard_urls(config.path, allow_pipe=config.allow_pipe):
        if "://" not in url and ":" not in url.partition("/")[0] and not Path(url).is_file():
            raise DataError(f"{url}: the file does not exist. Correct the address.")
        yield _part(url)


def _files(path: Path, pattern: str, what: str) -> list[Path]:
    files = sorted(path.rglob(pattern)) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise DataError(f"{path}: no {what} found. Specify a file, or a directory of them.")
    return files


def _row_groups(config: InputConfig) -> Iterator[Part]:
    parquet = require("pyarrow.parquet", extra="parquet", where=config.path)
    for file in _files(Path(config.path), "*.parquet", "parquet file"):
        try:
            metadata = parquet.read_metadata(file)
        except (ValueError, OSError) as error:  # the base classes of pyarrow's errors
            raise DataError(f"{file}: not a parquet file ({error}). Correct or remove the file.") from error
        row = 0
        for group in range(metadata.num_row_groups):
            count = metadata.row_group(group).num_rows
            yield _part(str(file), start=group, stop=group + 1, first_row=row, records=count)
            row += count


def _lines(config: InputConfig) -> Iterator[Part]:
    for file in _files(Path(config.path), "*.jsonl", "JSON lines file"):
        yield from _line_ranges(file)


def _line_ranges(file: Path) -> Iterator[Part]:
    """Ranges of whole lines. The file is read once; only line ends are searched."""
    start = offset = row = lines = 0
    is_ended = True
    with open(file, "rb", buffering=0) as stream:
        while block := stream.read(_BLOCK):
            ends = np.flatnonzero(np.frombuffer(block, np.uint8) == 10)
            place = 0
            while place < len(ends):
                step = min(LINES_PER_PART - lines, len(ends) - place)
                within = int(np.searchsorted(ends, start + BYTES_PER_PART - offset))
                step = max(1, min(step, within - place + 1))
                lines += step
                place += step
                stop = offset + int(ends[place - 1]) + 1
                if lines == LINES_PER_PART or stop - start >= BYTES_PER_PART:
                    yield _part(str(file), start=start, stop=stop, first_row=row, records=lines)
                    start, row, lines = stop, row + lines, 0
            offset += len(block)
            is_ended = block.endswith(b"\n")
    if offset > start:
        yield _part(str(file), start=start, stop=offset, first_row=row, records=lines + (not is_ended))


def _images(config: InputConfig) -> Iterator[Part]:
    path = Path(config.path)
    if not path.is_dir():
        raise DataError(f"{path}: the directory does not exist. Specify a directory of images.")
    if (path / CAPTIONS_NAME).is_file():
        yield from _line_ranges(path / CAPTIONS_NAME)
        return
    yield from _groups(_walk(path, MEDIA_EXTENSIONS), IMAGES_PER_PART)


def _documents(config: InputConfig) -> Iterator[Part]:
    path = Path(config.path)
    if not path.exists():
        raise DataError(
            f"{path}: the path does not exist. Specify a PDF, a directory of PDFs, or a list in a .txt file."
        )
    if path.suffix == ".txt":
        names = path.read_text(encoding="utf-8").splitlines()
        files = [str(path.parent / name.strip()) for name in names if name.strip()]
    else:
        files = _walk(path, ("pdf",)) if path.is_dir() else [str(path)]
    yield from _groups(files, DOCUMENTS_PER_PART)


def _walk(directory: Path, extensions: Sequence[str]) -> list[str]:
    ends = tuple(f".{extension}" for extension in extensions)
    return sorted(
        os.path.join(root, name)
        for root, _, names in os.walk(directory)
        for name in names
        if name.lower().endswith(ends)
    )


def _groups(files: Sequence[str], size: int) -> Iterator[Part]:
    for start in range(0, len(files), size):
        group = files[start : start + size]
        yield _part(*group, first_row=start, records=len(group))


_SPLITTERS = {
    "shards": _shards,
    "webdataset": _tars,
    "parquet": _row_groups,
    "jsonl": _lines,
    "imagefolder": _images,
    "pdf": _documents,
}
