# SPDX-License-Identifier: Apache-2.0
"""Read the items of benchmark files for decontamination: texts and images, with or without answers.

Comes before table.py. Takes the files that evaluation reads: VLMEvalKit tables (.tsv), Hugging Face parquet files, and JSON
lines with questions, messages or conversations. Unlike the readers of training data, rows without an answer count,
because test splits have none.
"""

import json
import string
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindvl_data.curation.record import Record
from mindvl_data.errors import DataError, SampleError
from mindvl_data.formats.columns import IMAGE_NAMES, flat_media
from mindvl_data.formats.foreign import ANSWER_FIELDS, QUESTION_FIELDS, to_record
from mindvl_data.formats.parquet import parquet_files, parquet_rows
from mindvl_data.formats.record import Medium, Origin, RecordError, Url, media_paths, read_json_lines
from mindvl_data.formats.tsv import TableReader, table_rows

_CONVERSATIONS = ("messages", "conversations", "texts", "content")
_OPTIONS = ("options", "choices")


@dataclass(frozen=True, kw_only=True)
class BenchmarkItem:
    """One question of a benchmark.

    Attributes:
        name: File, row, and the id of the row if it has one.
        texts: Question, hint, options and answers, each alone, and all but the answers joined by line ends.
        images: Encoded images.
    """

    name: str
    texts: tuple[str, ...]
    images: tuple[bytes, ...]


def read_benchmark(path: Path) -> Iterator[BenchmarkItem]:
    """The items of a .tsv, .parquet, .json or .jsonl file, or of a directory of parquet files.

    Raises:
        DataError: The file has another format, or a row or an image is invalid.
    """
    if path.suffix == ".tsv":
        table = TableReader(path, None)
        for row in table_rows(path):
            origin, values = _checked(row)
            yield _item(origin, values, table.media(origin, values))
    elif path.suffix == ".parquet" or path.is_dir():
        root = path if path.is_dir() else path.parent
        for origin, values in parquet_rows(parquet_files(path)):
            yield _item(origin, values, flat_media(values.pop("").get("image", []), root, origin))
    elif path.suffix in (".jsonl", ".json"):
        for row in read_json_lines(path):
            origin, values = _checked(row)
            names = next((values[name] for name in IMAGE_NAMES if values.get(name)), None)
            yield _item(origin, values, media_paths(names, path.parent, origin))
    else:
        raise DataError(f"{path}: the format of the benchmark is not known. Use a .tsv, .parquet or .jsonl file.")


def _checked(row: Any) -> tuple[Origin, dict[str, Any]]:
    if isinstance(row, RecordError):
        raise row
    return row


def _item(origin: Origin, row: dict[str, Any], media: tuple[Medium, ...]) -> BenchmarkItem:
    identity = next((row[name] for name in ("id", "index", "question_id") if row.get(name) not in (None, "")), None)
    name = f"{origin}" if identity is None else f"{origin} (id {identity})"
    if any(isinstance(item, Url) for item in media):
        raise DataError(f"{origin}: an image is an address, which is not downloaded. Copy the images to the benchmark.")
    try:
        images = tuple(
            item.read_bytes() if isinstance(item, Path) else item for item in media if not isinstance(item, Url)
        )
    except OSError as error:
        raise DataError(f"{origin}: an image cannot be read: {error}. Copy it to the benchmark.") from error
    return BenchmarkItem(name=name, texts=tuple(dict.fromkeys(filter(None, _texts(origin, row)))), images=images)


def _texts(origin: Origin, row: dict[str, Any]) -> list[str]:
    if any(row.get(name) for name in _CONVERSATIONS):
        try:
            return Record(number=0, id=str(origin), body=to_record(row, ())).texts()
        except SampleError as error:
            raise DataError(f"{origin}: {error}. Correct the row.") from error
    asked = [text for name in ("hint", *QUESTION_FIELDS) for text in _strings(row.get(name))]
    options = [(letter, text) for letter in string.ascii_uppercase for text in _strings(row.get(letter))]
    listed = [text for name in _OPTIONS for text in _strings(row.get(name))]
    options = options or list(zip(string.ascii_uppercase, listed, strict=False))
    answers = [text for name in ANSWER_FIELDS for text in _strings(row.get(name))]
    joined = "\n".join([*asked, *(f"{letter}. {text}" for letter, text in options)])
    return [*asked, *(text for _, text in options), *answers, joined]


def _strings(value: Any) -> list[str]:
    """The texts of a field: a string, a list of strings, or a list that is stored as one string."""
    if isinstance(value, str) and value.startswith("["):
        try:
            value = json.loads(value)
        except ValueError:
            return [str(value)]
    if isinstance(value, list):
        return [text for part in value for text in _strings(part)]
    return [value] if isinstance(value, str) and value.strip() else []
