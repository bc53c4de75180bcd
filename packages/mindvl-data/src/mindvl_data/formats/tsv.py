# SPDX-License-Identifier: Apache-2.0
"""VLMEvalKit tables: one line per question, images as base64 in the table.

Columns: `index`; `image` (base64, a list of them, or the `index` of an earlier row that has the same image) or
`image_path`; `question`; optionally `hint` and options `A`, `B`, ...; `answer` (with options: a letter). What else
there is, such as `category`, goes to `meta`. A row becomes one question and one answer, images first.
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
    Place,
    RecordError,
    Records,
    Row,
    SourceRecord,
    each_row,
    extras,
    media_paths,
    open_source,
)

MAX_REFERENCE = 64  # characters; a shorter `image` is the index of another row, as in VLMEvalKit
CHOOSE = "Answer with the letter of the right option."

_USED = ("index", "image", "image_path", "question", "hint", "answer", *string.ascii_uppercase)


def read_tsv(path: Path, image_root: Path | None) -> Records:
    """Records of a table; names in `image_path` are relative to `image_root`, else to the file's directory."""
    if not path.is_file():
        raise DataError(f"file does not exist. {path}. Name a VLMEvalKit table.")
    total = 0
    wanted: set[str] = set()
    for row in _rows(path):
        total += 1
        images = [] if isinstance(row, RecordError) else _listed(row[1].get("image", ""))
        wanted |= {name for name in images if len(name) <= MAX_REFERENCE}
    reader = _TableReader(path.parent if image_root is None else image_root, wanted)
    return Records(total=total, records=reader.records(path))


class _TableReader:
    """Keeps the images that later rows refer to."""

    def __init__(self, root: Path, wanted: set[str]) -> None:
        self._root = root
        self._wanted = wanted
        self._images: dict[str, tuple[bytes, ...]] = {}

    def records(self, path: Path) -> Iterator[Item]:
        return each_row(_rows(path), self._record)

    def _record(self, place: Place, row: dict[str, Any]) -> SourceRecord:
        media = self._media(place, row)
        options = {letter: row[letter] for letter in string.ascii_uppercase if row.get(letter)}
        question, answer = row.get("question", ""), row.get("answer", "")
        if not question or not answer:
            raise RecordError(
                f"row has no {'answer' if question else 'question'}", place, "Is this a VLMEvalKit table?"
            )
        if options and answer not in options:
            raise RecordError(f"answer {answer!r:.80} is none of the options {', '.join(options)}", place)
        lines = [row.get("hint", ""), question, *(f"{letter}. {text}" for letter, text in options.items())]
        text = "\n".join(line for line in (*lines, CHOOSE if options else "") if line)
        shown = [*[{"type": "image"}] * len(media), {"type": "text", "text": text}]
        messages = [{"role": "user", "content": shown}, {"role": "assistant", "content": answer}]
        rest = {"id": row.get("index") or None, **{name: value for name, value in row.items() if value}}
        return SourceRecord(body={"messages": messages, **extras(rest, _USED)}, media=media, place=place)

    def _media(self, place: Place, row: dict[str, Any]) -> tuple[Path | bytes, ...]:
        names = _listed(row.get("image", ""))
        if not names:
            return media_paths(_listed(row.get("image_path", "")), self._root, place)
        images: list[bytes] = []
        for name in names:
            if len(name) > MAX_REFERENCE:
                images.append(_decoded(name, place))
            elif name in self._images:
                images += self._images[name]
            else:
                raise RecordError(f"`image` refers to row {name!r}, which is not before it or has no image", place)
        if row.get("index") in self._wanted:
            self._images[row["index"]] = tuple(images)
        return tuple(images)


def _rows(path: Path) -> Iterator[Row | RecordError]:
    csv.field_size_limit(1 << 30)  # the limit of the csv module is below one image
    with open_source(path) as file:
        lines = csv.reader(io.TextIOWrapper(file, encoding="utf-8-sig", newline=""), delimiter="\t")
        number = 0
        try:
            header = next(lines, [])
            if "question" not in header:
                raise DataError(f"table has no column `question`. {path}. Is this a VLMEvalKit table?")
            for number, values in enumerate(lines, 1):
                place = Place(path, number)
                if len(values) == len(header):
                    yield place, dict(zip(header, values, strict=True))
                elif values:
                    yield RecordError(f"row has {len(values)} fields, the header {len(header)}", place)
        except (csv.Error, UnicodeDecodeError) as error:
            what = "text is not UTF-8" if isinstance(error, UnicodeDecodeError) else "broken table"
            raise DataError(f"{what}: {error}. {path} after row {number}. Mend the file.") from error


def _listed(value: str) -> list[str]:
    """One value, or those of a list as Python or JSON writes it; base64 and names of files hold no comma."""
    if value.startswith("[") and value.endswith("]"):
        return [item.strip(" '\"") for item in value[1:-1].split(",") if item.strip(" '\"")]
    return [value] if value else []


def _decoded(text: str, place: Place) -> bytes:
    try:
        return base64.b64decode(text.rpartition(",")[2] if text.startswith("data:") else text, validate=True)
    except binascii.Error as error:
        raise RecordError(f"`image` is not base64: {error}", place) from error
