# SPDX-License-Identifier: Apache-2.0
"""VLMEvalKit tables: one row per question, images as base64 in the table.

Columns: `index`; `image` (base64, a list of them, or the `index` of an earlier row with the same image) or
`image_path`; `question`; optionally `hint` and options `A`, `B`, ...; `answer` (with options: a letter). Other columns,
such as `category`, go to `meta`. A row becomes one question and one answer, images first.
"""

import base64
import binascii
import csv
import io
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mindvl_data.errors import DataError
from mindvl_data.formats.record import (
    Item,
    Medium,
    Origin,
    RecordError,
    Records,
    Row,
    SourceRecord,
    each_row,
    extras,
    media_paths,
    open_source,
)

MAX_REFERENCE = 64  # characters; an `image` of at most this length is the index of another row, as in VLMEvalKit
CHOOSE = "Answer with the letter of the right option."

_USED = ("index", "image", "image_path", "question", "hint", "answer", *string.ascii_uppercase)


def read_tsv(path: Path, image_root: Path | None) -> Records:
    """Read a table; names in `image_path` are relative to `image_root` or else to the directory of the file."""
    if not path.is_file():
        raise DataError(f"{path}: the file does not exist. Specify a VLMEvalKit table.")
    reader = TableReader(path, image_root)
    return Records(total=reader.num_rows, records=reader.records(path))


class TableReader:
    """Converts rows, and keeps the images that later rows refer to.

    Attributes:
        num_rows: Rows of the table, including invalid ones.
    """

    def __init__(self, path: Path, image_root: Path | None) -> None:
        self._root = path.parent if image_root is None else image_root
        self._referenced: set[str] = set()
        self.num_rows = 0
        for row in table_rows(path):
            self.num_rows += 1
            images = [] if isinstance(row, RecordError) else _listed(row[1].get("image", ""))
            self._referenced |= {name for name in images if len(name) <= MAX_REFERENCE}
        self._images: dict[str, tuple[bytes, ...]] = {}

    def records(self, path: Path) -> Iterator[Item]:
        return each_row(table_rows(path), self._record)

    def _record(self, origin: Origin, row: dict[str, Any]) -> SourceRecord:
        media = self.media(origin, row)
        options = {letter: row[letter] for letter in string.ascii_uppercase if row.get(letter)}
        question, answer = row.get("question", ""), row.get("answer", "")
        if not question or not answer:
            raise RecordError(
                f"the row has no {'answer' if question else 'question'}", origin, "Use a VLMEvalKit table."
            )
        if options and answer not in options:
            raise RecordError(f"the answer must be one of the options {', '.join(options)}, got {answer!r:.80}", origin)
        lines = [row.get("hint", ""), question, *(f"{letter}. {text}" for letter, text in options.items())]
        text = "\n".join(line for line in (*lines, CHOOSE if options else "") if line)
        shown = [*[{"type": "image"}] * len(media), {"type": "text", "text": text}]
        messages = [{"role": "user", "content": shown}, {"role": "assistant", "content": answer}]
        rest = {"id": row.get("index") or None, **{name: value for name, value in row.items() if value}}
        return SourceRecord(body={"messages": messages, **extras(rest, _USED)}, media=media, origin=origin)

    def media(self, origin: Origin, row: dict[str, Any]) -> tuple[Medium, ...]:
        """The images of a row; rows must be given in order, because a row may refer to an earlier one."""
        names = _listed(row.get("image", ""))
        if not names:
            return media_paths(_listed(row.get("image_path", "")), self._root, origin)
        images: list[bytes] = []
        for name in names:
            if len(name) > MAX_REFERENCE:
                images.append(_decoded(name, origin))
            elif name in self._images:
                images += self._images[name]
            else:
                raise RecordError(
                    f"`image` refers to index {name!r}, but no earlier row has this index and an image", origin
                )
        if row.get("index") in self._referenced:
            self._images[row["index"]] = tuple(images)
        return tuple(images)


def table_rows(path: Path) -> Iterator[Row | RecordError]:
    """Each row as a dictionary by column."""
    csv.field_size_limit(1 << 30)  # the default limit is less than one image
    with open_source(path) as file:
        lines = csv.reader(io.TextIOWrapper(file, encoding="utf-8-sig", newline=""), delimiter="\t")
        number = 0
        try:
            header = next(lines, [])
            if "question" not in header:
                raise DataError(f"{path}: the table has no column `question`. Use a VLMEvalKit table.")
            for number, values in enumerate(lines, 1):
                origin = Origin(path, number)
                if len(values) == len(header):
                    yield origin, dict(zip(header, values, strict=True))
                elif values:
                    yield RecordError(f"expected {len(header)} fields as in the header, got {len(values)}", origin)
        except (csv.Error, UnicodeDecodeError) as error:
            what = "the text is not valid UTF-8" if isinstance(error, UnicodeDecodeError) else "invalid table"
            raise DataError(f"{path} after row {number}: {what} ({error}). Correct the file.") from error


def _listed(value: str) -> list[str]:
    """The value, or the items of a list in Python or JSON notation; base64 and file names have no commas."""
    if value.startswith("[") and value.endswith("]"):
        return [item.strip(" '\"") for item in value[1:-1].split(",") if item.strip(" '\"")]
    return [value] if value else []


def _decoded(text: str, origin: Origin) -> bytes:
    try:
        return base64.b64decode(text.rpartition(",")[2] if text.startswith("data:") else text, validate=True)
    except binascii.Error as error:
        raise RecordError(f"`image` is not base64: {error}", origin) from error
