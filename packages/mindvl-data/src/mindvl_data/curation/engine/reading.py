# SPDX-License-Identifier: Apache-2.0
"""Part of an input -> records, by the readers of mindvl_data.formats.

Comes after parts.py, before the steps. A record that cannot be read is yielded as Unreadable and reading continues. All
fields of the source that are not part of the record format stay in `body` until output.py moves them to `meta`.
"""

import heapq
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from mindvl_data.curation.config import InputConfig
from mindvl_data.curation.engine.parts import Part
from mindvl_data.curation.extras import require
from mindvl_data.curation.record import Record
from mindvl_data.errors import DataError, SampleError, redact
from mindvl_data.formats import columns, imagefolder, parquet, webdataset
from mindvl_data.formats.conversation import conversation_record
from mindvl_data.formats.foreign import to_record
from mindvl_data.formats.record import Medium, Origin, RecordError, SourceRecord, Url, check_object, extras, media_paths
from mindvl_data.samples import MAX_RECORD_BYTES
from mindvl_data.shards.tar import VIDEO_EXTENSIONS, Member
from mindvl_data.shards.validation import sort_members

SAMPLE_WINDOW = 20  # `take` records are chosen among the first `take * SAMPLE_WINDOW` of a part

_MEDIA_FIELDS = ("image", "images", "video", "videos")
_RESERVED = ("messages", "content", "id", "tools", "min_pixels", "max_pixels")


@dataclass(frozen=True)
class Unreadable:
    """A record that cannot be read.

    Attributes:
        ends_part: The rest of the part cannot be read either.
    """

    number: int
    id: str
    reason: str
    ends_part: bool = False


# A record that is not yet loaded: its label in the id, and a function that returns body and media.
_Lazy = tuple[str, Callable[[], SourceRecord]]


def read_part(part: Part, config: InputConfig, *, seed: int, max_media_bytes: int) -> Iterator[Record | Unreadable]:
    """The records of a part in order, numbered by their position."""
    items = enumerate(_guarded(_READERS[config.format](part, config), part))
    chosen: Iterable[tuple[int, _Lazy | Unreadable]] = items if part.take is None else _sample(items, part, seed)
    place = f"{config.shown_name}/{redact(_short(part, config))}"
    for position, item in chosen:
        number = part.number << 32 | position
        if isinstance(item, Unreadable):
            yield Unreadable(number, f"{place}:{position}", item.reason, item.ends_part)
            continue
        label, load = item
        name = f"{place}:{label}" if len(part.files) == 1 or config.format != "pdf" else f"{config.shown_name}/{label}"
        if config.format == "imagefolder" and not part.stop:
            name = f"{config.shown_name}/{label}"
        try:
            source = load()
            media = tuple(_loaded(medium, max_media_bytes) for medium in source.media)
            yield Record(number=number, id=name, body=_lifted(source.body), media=media)
        except RecordError as error:
            yield Unreadable(number, name, error.what)
        except (SampleError, ValueError, RecursionError, OSError, MemoryError) as error:
            yield Unreadable(number, name, f"{type(error).__name__}: {error}" if not str(error) else str(error))


def _guarded(items: Iterator[_Lazy | Unreadable], part: Part) -> Iterator[_Lazy | Unreadable]:
    """The items; an error of the file itself becomes a last item."""
    try:
        yield from items
    except (DataError, OSError, ValueError, EOFError) as error:
        yield Unreadable(0, "", f"the rest of {redact(part.files[0])} cannot be read: {error}", ends_part=True)


def _sample(
    items: Iterator[tuple[int, _Lazy | Unreadable]], part: Part, seed: int
) -> Iterator[tuple[int, _Lazy | Unreadable]]:
    """`part.take` of the first records of a part, by a hash of seed and position."""
    assert part.take is not None
    kept: list[tuple[int, int, _Lazy | Unreadable]] = []
    for position, item in items:
        if position >= SAMPLE_WINDOW * part.take:
            break
        text = f"{seed}/sample/{part.number}/{position}".encode()
        rank = -int.from_bytes(blake2b(text, digest_size=8).digest(), "little")
        (heapq.heappush if len(kept) < part.take else heapq.heappushpop)(kept, (rank, position, item))
    yield from sorted(((position, item) for _, position, item in kept), key=lambda pair: pair[0])


def _short(part: Part, config: InputConfig) -> str:
    """Name of the part's file, relative to the directory of the input."""
    file, root = part.files[0], config.path.rstrip("/")
    return os.path.relpath(file, root) if file.startswith(root + "/") else file.rsplit("/", 1)[-1]


def _loaded(medium: Medium, max_bytes: int) -> bytes:
    if isinstance(medium, Url):
        raise SampleError(f"image {redact(medium.address)[:120]} is an address, which is not downloaded")
    if isinstance(medium, Path) and not stat.S_ISREG(medium.stat().st_mode):
        raise SampleError(f"{medium.name} is not a regular file")  # reading a pipe would never end
    size = len(medium) if isinstance(medium, bytes) else medium.stat().st_size
    if size > max_bytes:
        raise SampleError(f"an image or document has {size:,} bytes, more than limits.media_mib allows ({max_bytes:,})")
    return medium if isinstance(medium, bytes) else medium.read_bytes()


def _lifted(body: dict[str, Any]) -> dict[str, Any]:
    """The body with the fields of `meta` beside the others."""
    meta = body.get("meta")
    if not isinstance(meta, dict):
        return body
    rest = {name: value for name, value in body.items() if name != "meta"}
    return {**{name: value for name, value in meta.items() if name not in _RESERVED}, **rest}


def _tar(part: Part, config: InputConfig) -> Iterator[_Lazy | Unreadable]:
    for sample in webdataset.samples_of([part.files[0]]):
        yield str(sample["__key__"]), partial(_tar_record, sample)


def _tar_record(sample: dict[str, Any]) -> SourceRecord:
    """Unlike the reader of `mindvl data write`, keeps all fields, among them those of img2dataset's metadata."""
    key, members, contents, offset = sample["__key__"], [], [], 0
    for name, content in sample.items():
        if not name.startswith("__"):
            members.append(Member(name=f"{key}.{name}", offset=offset, length=len(content)))
            contents.append(content)
            offset += len(content)
    whole = b"".join(contents)
    (record, *media), is_json = sort_members(members, whole)
    text = whole[record.offset : record.offset + record.length]
    kinds = ["video" if member.extension in VIDEO_EXTENSIONS else "image" for member in media]
    fields: dict[str, Any] = {}
    for member in members:
        if member.extension == "json":
            value = _parsed(whole[member.offset : member.offset + member.length])
            fields = value if isinstance(value, dict) else {"conversations": value}
    if is_json:
        body = _converted(fields, kinds)
    else:
        shown = [{"type": kind} for kind in kinds]
        body = {**fields, "content": [*shown, text.decode("utf-8")] if shown else text.decode("utf-8")}
    files = tuple(whole[member.offset : member.offset + member.length] for member in media)
    return SourceRecord(body={"id": key, **body}, media=files, origin=Origin(key))


def _converted(fields: dict[str, Any], kinds: list[str]) -> dict[str, Any]:
    """The record format with the fields that it does not use; media without a text stay without one."""
    body = to_record(fields, kinds)
    if not isinstance(body, dict) or not {"messages", "content"} & body.keys():
        if not kinds:
            raise SampleError(
                f"expected a conversation, a question with an answer, or a text; the fields are {', '.join(fields)}"
            )
        body = {"content": [{"type": kind} for kind in kinds]}
    used = ("messages", "content", "conversations", "texts", *columns.CONTENT_FIELDS, *_MEDIA_FIELDS)
    return {**{name: value for name, value in fields.items() if name not in used}, **body}


def _parsed(text: bytes) -> Any:
    if len(text) > MAX_RECORD_BYTES:
        raise SampleError(f"record has {len(text)} bytes, more than the limit of {MAX_RECORD_BYTES}")
    return json.loads(text)


def _rows(part: Part, config: InputConfig) -> Iterator[_Lazy | Unreadable]:
    require("pyarrow", extra="parquet", where=config.path)
    path = Path(part.files[0])
    root = config.image_root or (Path(config.path) if Path(config.path).is_dir() else path.parent)
    for origin, row in parquet.parquet_rows([path], range(part.start, part.stop)):
        yield f"row {part.first_row + (origin.row or 0)}", partial(_table_record, root, origin, row)


def _table_record(root: Path, origin: Origin, row: dict[str, Any]) -> SourceRecord:
    return columns.column_record(root, origin, row)


def _lines(part: Part, config: InputConfig) -> Iterator[_Lazy | Unreadable]:
    path = Path(part.files[0])
    root = config.image_root or path.parent
    with open(path, "rb") as stream:
        stream.seek(part.start)
        left, row = part.stop - part.start, part.first_row
        while left > 0:
            line = stream.readline(min(left, MAX_RECORD_BYTES + 1))
            left -= len(line)
            row += 1
            if len(line) > MAX_RECORD_BYTES:
                while left > 0 and not line.endswith(b"\n"):
                    line = stream.readline(min(left, MAX_RECORD_BYTES))
                    left -= len(line)
                yield Unreadable(0, "", f"line {row} has more than the limit of {MAX_RECORD_BYTES} bytes")
            elif not line:
                yield Unreadable(0, "", "the file is shorter than when the run began", ends_part=True)
                return
            elif line.strip():
                yield str(row), partial(_line_record, root, path, row, line)


def _line_record(root: Path, path: Path, row: int, line: bytes) -> SourceRecord:
    origin = Origin(path, row)
    fields = check_object(json.loads(line.decode("utf-8-sig" if row == 1 else "utf-8")), origin)
    if isinstance(fields.get("messages", fields.get("conversations")), list):
        return conversation_record(root, origin, fields)
    if isinstance(fields.get("text"), str) and not any(name in fields for name in _MEDIA_FIELDS):
        return SourceRecord(body={**extras(fields, ("text",)), "content": fields["text"]}, media=(), origin=origin)
    images, videos = (
        media_paths(fields.get(kind + "s", fields.get(kind)), root, origin) for kind in ("image", "video")
    )
    body = _converted(fields, ["image"] * len(images) + ["video"] * len(videos))
    return SourceRecord(body=body, media=images + videos, origin=origin)


def _images(part: Part, config: InputConfig) -> Iterator[_Lazy | Unreadable]:
    if part.stop:
        yield from _lines(part, config)
        return
    for name in part.files:
        yield os.path.relpath(name, config.path), partial(_image_record, Path(name), Path(config.path))


def _image_record(file: Path, root: Path) -> SourceRecord:
    origin, row = Origin(file), {"id": file.relative_to(root).as_posix()}
    if file.with_suffix(".txt").is_file():
        return imagefolder.record_of_pair(origin, row)
    kind = "video" if file.suffix[1:].lower() in VIDEO_EXTENSIONS else "image"
    return SourceRecord(body={"content": [{"type": kind}], **row}, media=(file,), origin=origin)


def _documents(part: Part, config: InputConfig) -> Iterator[_Lazy | Unreadable]:
    root = Path(config.path) if Path(config.path).is_dir() else Path(config.path).parent
    for name in part.files:
        label = os.path.relpath(name, root)
        body = {"id": label, "content": []}
        yield label, partial(SourceRecord, body=body, media=(Path(name),), origin=Origin(name))


_READERS: dict[str, Callable[[Part, InputConfig], Iterator[_Lazy | Unreadable]]] = {
    "shards": _tar,
    "webdataset": _tar,
    "parquet": _rows,
    "jsonl": _lines,
    "imagefolder": _images,
    "pdf": _documents,
}
