# SPDX-License-Identifier: Apache-2.0
"""Rows of tables with named columns -> records: which columns are media, and what the others mean.

Used by parquet.py, datasets.py and table.py. foreign.py converts the columns that are not media.
"""

import json
import math
from pathlib import Path
from typing import Any

from mindvl_data.formats.foreign import ANSWER_FIELDS, CAPTION_FIELDS, QUESTION_FIELDS, to_record
from mindvl_data.formats.record import Medium, Origin, RecordError, SourceRecord, extras, media_in_order, media_paths

IMAGE_NAMES = ("image", "images", "img", "jpg", "jpeg", "png", "webp", "picture", "pictures")  # names in other datasets
VIDEO_NAMES = ("video", "videos", "mp4")

CONTENT_FIELDS = (*QUESTION_FIELDS, *ANSWER_FIELDS, *CAPTION_FIELDS)

_USED = ("messages", "conversations", "texts", "input", *CONTENT_FIELDS)


def media_columns(schema: Any) -> dict[str, str]:
    """The kind ("image" or "video") of each media column of an arrow schema, by name."""
    return {field.name: kind for field in schema if (kind := _media_kind(field))}


def with_media_apart(row: dict[str, Any], kinds: dict[str, str]) -> dict[str, Any]:
    """The row with its media by kind under the empty name, which no column can have; null values are left out."""
    media = {kind: [row[name] for name in kinds if kinds[name] == kind] for kind in kinds.values()}
    return {"": media, **{name: value for name, value in row.items() if name not in kinds and value is not None}}


def column_record(root: Path, origin: Origin, row: dict[str, Any]) -> SourceRecord:
    """Convert a row of `with_media_apart`; file names are relative to `root`."""
    media = {kind: flat_media(values, root, origin) for kind, values in row[""].items()}
    images, videos = media.get("image", ()), media.get("video", ())
    texts = {name: _parsed(value) if name in _USED else value for name, value in row.items() if name}
    body = to_record(texts, ["image"] * len(images) + ["video"] * len(videos))
    if not isinstance(body, dict) or not {"messages", "content"} & body.keys():
        columns = ", ".join(texts) or "empty"
        raise RecordError(
            f"expected a conversation, a question with an answer, or a caption, got the columns {columns}", origin
        )
    shape = {name: body[name] for name in ("messages", "content") if name in body}
    rest = {name: value for name, value in texts.items() if name not in _USED and (name == "tools" or _is_plain(value))}
    body = {**shape, **extras(rest, ())}
    return SourceRecord(body=body, media=media_in_order(body, images, videos, origin), origin=origin)


def flat_media(values: list[Any], root: Path, origin: Origin) -> tuple[Medium, ...]:
    """The media of a row, in which columns may hold bytes, names, structs of them, or lists."""
    found: list[Medium] = []
    for value in values:
        if isinstance(value, list):
            found += flat_media(value, root, origin)
        elif isinstance(value, dict):
            found += flat_media([value["path"] if value.get("bytes") is None else value["bytes"]], root, origin)
        elif isinstance(value, bytes):
            found.append(value)
        else:
            found += media_paths(value, root, origin)
    return tuple(found)


def _media_kind(field: Any) -> str | None:
    name, type_ = field.name.lower(), field.type
    while hasattr(type_, "value_type"):
        type_ = type_.value_type
    children = {type_.field(n).name for n in range(type_.num_fields)} if hasattr(type_, "num_fields") else set()
    named = str(type_) in ("string", "large_string", "binary", "large_binary") and name in IMAGE_NAMES + VIDEO_NAMES
    if children >= {"bytes", "path"} or named:
        return "video" if "video" in name or name in VIDEO_NAMES else "image"
    return None


def _parsed(value: Any) -> Any:
    """Parse a conversation that is stored as one JSON string, as some tables do."""
    if isinstance(value, str) and value[:2] in ("[{", "[ ", "[\n"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value))
