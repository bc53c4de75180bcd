# SPDX-License-Identifier: Apache-2.0
"""Types and functions that the input formats share.

Comes before the shard writer. An invalid record is yielded as a RecordError, so that reading continues after it; the
writer raises it, or excludes the record with --skip-bad.
"""

import base64
import binascii
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindvl_data.errors import DataError, SampleError
from mindvl_data.formats.foreign import OWN_FIELDS

MEDIA_TYPES = ("image", "video")
_MAX_NAME = 1024  # characters; a longer name is an image in base64


@dataclass(frozen=True)
class Origin:
    """The source of a record, for messages."""

    file: Path | str
    row: int | None = None  # position from 1; in JSON lines the line number, including blank lines

    def __str__(self) -> str:
        return str(self.file) if self.row is None else f"{self.file} row {self.row}"


class RecordError(DataError):
    """An invalid record of a source."""

    def __init__(self, what: str, origin: Origin, remedy: str = "Correct or remove the record.") -> None:
        super().__init__(f"{origin}: {what}. {remedy}")
        self.what = what
        self.origin = origin
        self.remedy = remedy


@dataclass(frozen=True, kw_only=True)
class SourceRecord:
    """One record to be written into a shard."""

    body: dict[str, Any]  # the content of KEY.json, see samples.py
    media: tuple["Medium", ...]  # images and videos in the order of their parts in the text
    origin: Origin


@dataclass(frozen=True)
class Url:
    """The http or https address of an image or video; it is downloaded only if the user asks for it."""

    address: str


Medium = Path | bytes | Url
Item = SourceRecord | RecordError
Row = tuple[Origin, dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Records:
    """The records of a source and their number."""

    total: int  # for progress reports; includes blank lines; 0 if unknown
    records: Iterator[Item]  # read lazily


def each_row(
    rows: Iterable[Row | RecordError], convert: Callable[[Origin, dict[str, Any]], SourceRecord]
) -> Iterator[Item]:
    """Convert rows one by one; an invalid row is yielded as a RecordError."""
    for row in rows:
        if isinstance(row, RecordError):
            yield row
            continue
        origin, value = row
        try:
            yield convert(origin, value)
        except RecordError as bad:
            yield bad
        except SampleError as error:
            yield RecordError(str(error), origin)


def count_lines(path: Path) -> int:
    """The number of lines of a file."""
    if not path.is_file():
        raise DataError(f"{path}: the file does not exist. Specify a JSON lines file.")
    with open_source(path) as file:
        lines, last = 0, b"\n"
        for block in iter(lambda: file.read(1 << 20), b""):
            lines, last = lines + block.count(b"\n"), block[-1:]
        return lines + (last != b"\n")


def open_source(path: Path) -> Any:
    """Open a source file in binary mode."""
    try:
        return open(path, "rb")
    except OSError as error:
        raise DataError(
            f"{path}: the file cannot be read: {error.strerror}. Check its name and permissions."
        ) from error


def read_json(path: Path) -> tuple[int, Iterator[Row | RecordError]]:
    """Number of records, and the object of each: of a JSON list, or of JSON lines. The content decides, not the name.

    Raises:
        DataError: The file does not exist, or it is neither.
    """
    if not path.is_file():
        raise DataError(f"{path}: the file does not exist. Specify a file with a JSON list or JSON lines.")
    with open_source(path) as file:
        head = file.read(4096).decode("utf-8-sig", "replace").lstrip()
    first, _, rest = head.partition("\n")
    if path.suffix == ".jsonl" or (rest.strip() and _is_one_object(first)):
        return count_lines(path), read_json_lines(path)
    try:
        with open_source(path) as file:
            rows = json.loads(file.read().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: invalid JSON ({error}). Correct the file.") from error
    if not isinstance(rows, list):
        got = type(rows).__name__
        if isinstance(rows, dict):
            got = f"an object with {', '.join(map(repr, list(rows)[:8])) or 'no fields'}"
        raise DataError(
            f"{path}: the file must hold a JSON list, got {got}. Use a list of records, or JSON lines (.jsonl)."
        )
    return len(rows), _numbered(rows, path)


def _is_one_object(line: str) -> bool:
    """Whether a line is a whole object."""
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _numbered(rows: list[Any], path: Path) -> Iterator[Row | RecordError]:
    for number, row in enumerate(rows, 1):
        origin = Origin(path, number)
        try:
            yield origin, check_object(row, origin)
        except RecordError as bad:
            yield bad


def read_json_lines(path: Path) -> Iterator[Row | RecordError]:
    """The object in each line that is not blank."""
    with open_source(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            origin = Origin(path, number)
            try:
                yield origin, check_object(json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8")), origin)
            except UnicodeDecodeError as error:
                yield RecordError(f"the text is not valid UTF-8: {error}", origin, "Convert the file to UTF-8.")
            except (ValueError, RecursionError) as error:
                yield RecordError(f"invalid JSON: {error}", origin)
            except RecordError as bad:
                yield bad


def check_object(value: Any, origin: Origin) -> dict[str, Any]:
    """Return the value if it is an object; raise RecordError otherwise."""
    if not isinstance(value, dict):
        raise RecordError(f"the record must be an object, got {type(value).__name__}", origin)
    return value


def media_paths(value: Any, root: Path, origin: Origin) -> tuple[Medium, ...]:
    """Media for a file name or a list of file names; relative ones are joined to `root`.

    A name may also be a data URL in base64, whose bytes are returned, or an http(s) address.
    """
    names = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) and name and "\0" not in name for name in names):
        raise RecordError(f"the media must be a file name or a list of file names, got {value!r:.80}", origin)
    return tuple(_medium(name, root, origin) for name in names)


def _medium(name: str, root: Path, origin: Origin) -> Medium:
    if name.startswith(("http://", "https://")):
        return Url(name)
    if not name.startswith("data:"):
        return _bare_base64(name, origin) if len(name) > _MAX_NAME else root / name.removeprefix("file://")
    head, comma, content = name.partition(",")
    if not comma or not head.endswith(";base64"):
        raise RecordError(f"the data URL must be in base64, got {name[:40]!r}", origin)
    try:
        return base64.b64decode(content, validate=True)
    except binascii.Error as error:
        raise RecordError(f"the data URL is not base64: {error}", origin) from error


def _bare_base64(text: str, origin: Origin) -> bytes:
    """The bytes of an image in base64 without the start of a data URL."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        what = f"the name of an image has {len(text)} characters and is not base64: {text[:40]!r}..."
        raise RecordError(what, origin, "Write a file name, or the image in base64.") from error


def media_in_order(
    body: dict[str, Any], images: tuple[Medium, ...], videos: tuple[Medium, ...], origin: Origin
) -> tuple[Medium, ...]:
    """Images and videos in one sequence, in the order of the parts of the record."""
    if not videos:
        return images  # their number is checked later, with the rest of the record
    remaining = {"image": list(images), "video": list(videos)}
    kinds = [part.get("type") for part in _parts(body) if isinstance(part, dict)]
    for kind, files in remaining.items():
        if kinds.count(kind) != len(files):
            raise RecordError(f"the text mentions {kinds.count(kind)} {kind}s, the record has {len(files)}", origin)
    return tuple(remaining[kind].pop(0) for kind in kinds if kind in MEDIA_TYPES)


def extras(row: dict[str, Any], used: tuple[str, ...]) -> dict[str, Any]:
    """`id`, pixel limits, `tools` and `meta` of a record; fields that are not in `used` go to `meta`."""
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
