# SPDX-License-Identifier: Apache-2.0
"""What every input format produces, and the reading they share.

Comes before the shard writer. A row that cannot be used is handed on as a RecordError, so that the rows after it can
still be read; the writer raises it, or counts it where the user asked for that.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindvl_data.errors import DataError, SampleError
from mindvl_data.formats.foreign import OWN_FIELDS

MEDIA_TYPES = ("image", "video")


@dataclass(frozen=True)
class Place:
    """Where a record comes from."""

    file: Path | str
    row: int | None = None  # from 1; lines of a text file, so that blank ones count

    def __str__(self) -> str:
        return str(self.file) if self.row is None else f"{self.file} row {self.row}"


class RecordError(DataError):
    """One row that cannot be used."""

    def __init__(self, what: str, place: Place, remedy: str = "Mend or remove the row.") -> None:
        super().__init__(f"{what}. {place}. {remedy}")
        self.what = what
        self.place = place


@dataclass(frozen=True, kw_only=True)
class SourceRecord:
    """One record on its way into a shard."""

    body: dict[str, Any]  # what KEY.json will hold, see samples.py
    media: tuple[Path | bytes, ...]  # images and videos, in the order in which the text mentions them
    place: Place


Item = SourceRecord | RecordError
Row = tuple[Place, dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Records:
    """What a format found: the records, read one by one, and how many there are."""

    total: int  # for progress only; blank lines count
    records: Iterator[Item]


def each_row(
    rows: Iterable[Row | RecordError], convert: Callable[[Place, dict[str, Any]], SourceRecord]
) -> Iterator[Item]:
    """Convert rows one by one; one that cannot be converted does not end the others."""
    for row in rows:
        if isinstance(row, RecordError):
            yield row
            continue
        place, value = row
        try:
            yield convert(place, value)
        except RecordError as bad:
            yield bad
        except SampleError as error:
            yield RecordError(str(error), place)


def count_lines(path: Path) -> int:
    """Lines of a file, without decoding it."""
    if not path.is_file():
        raise DataError(f"file does not exist. {path}. Name a JSON lines file.")
    with open_source(path) as file:
        lines, last = 0, b"\n"
        for block in iter(lambda: file.read(1 << 20), b""):
            lines, last = lines + block.count(b"\n"), block[-1:]
        return lines + (last != b"\n")


def open_source(path: Path) -> Any:
    """A source file, opened for bytes."""
    try:
        return open(path, "rb")
    except OSError as error:
        raise DataError(f"file cannot be read: {error.strerror}. {path}. Check its name and rights.") from error


def read_json_lines(path: Path) -> Iterator[Row | RecordError]:
    """Each line that is not blank, as an object."""
    with open_source(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            place = Place(path, number)
            try:
                yield place, check_object(json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8")), place)
            except UnicodeDecodeError as error:
                yield RecordError(f"text is not UTF-8: {error}", place, "Convert the file.")
            except (ValueError, RecursionError) as error:
                yield RecordError(f"broken JSON: {error}", place)
            except RecordError as bad:
                yield bad


def check_object(value: Any, place: Place) -> dict[str, Any]:
    """The value, which has to be an object."""
    if not isinstance(value, dict):
        raise RecordError(f"row is {type(value).__name__} instead of an object", place)
    return value


def media_paths(value: Any, root: Path, place: Place) -> tuple[Path, ...]:
    """Paths of a string or a list of strings, below `root` unless absolute."""
    names = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) and name and "\0" not in name for name in names):
        raise RecordError(f"files are {value!r:.200}", place, "Use a file name or a list of file names.")
    return tuple(root / name for name in names)


def media_in_order(
    body: dict[str, Any], images: tuple[Path | bytes, ...], videos: tuple[Path | bytes, ...], place: Place
) -> tuple[Path | bytes, ...]:
    """Images and videos in one row, as the parts of the record mention them."""
    if not videos:
        return images  # whether their number fits is checked with the rest of the record
    waiting = {"image": list(images), "video": list(videos)}
    kinds = [part.get("type") for part in _parts(body) if isinstance(part, dict)]
    for kind, there in waiting.items():
        if kinds.count(kind) != len(there):
            raise RecordError(f"text mentions {kinds.count(kind)} {kind}s, the row has {len(there)}", place)
    return tuple(waiting[kind].pop(0) for kind in kinds if kind in MEDIA_TYPES)


def extras(row: dict[str, Any], used: tuple[str, ...]) -> dict[str, Any]:
    """`id`, pixel limits, `tools` and `meta` of a record: what the row says beyond what the format reads."""
    body: dict[str, Any] = {}
    if row.get("id") is not None:
        body["id"] = str(row["id"])
    body |= {name: row[name] for name in OWN_FIELDS if row.get(name) is not None}
    meta = {key: value for key, value in row.items() if key not in (*used, "id", "meta", *OWN_FIELDS)}
    meta |= row["meta"] if isinstance(row.get("meta"), dict) else {}
    return body | ({"meta": meta} if meta else {})


def _parts(body: dict[str, Any]) -> Iterator[Any]:
    messages = body.get("messages", ())
    contents = [m.get("content") for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []
    for content in (*contents, body.get("content")):
        if isinstance(content, list):
            yield from content
