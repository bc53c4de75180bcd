# SPDX-License-Identifier: Apache-2.0
"""OpenAI-style JSON lines: `{"messages": [{"role", "content"}], "images": [NAME, ...], "videos": [NAME, ...]}`.

Content is a string or a list of parts (`text`, `image`, `video`, `box`, `point`, see samples.py). A part may name its
file (`{"type": "image", "image": NAME}`, `{"type": "image_url", "image_url": {"url": NAME}}`, `{"type": "video",
"video": NAME}`) instead of the lists of the record.
"""

from functools import partial
from pathlib import Path
from typing import Any

from mindvl_data.formats.record import (
    MEDIA_TYPES,
    Origin,
    RecordError,
    Records,
    SourceRecord,
    count_lines,
    each_row,
    extras,
    media_in_order,
    media_paths,
    read_json_lines,
)

_USED = ("messages", "images", "image", "videos", "video")


def read_messages(path: Path, image_root: Path | None) -> Records:
    """Read a JSON lines file; file names are relative to `image_root` or else to the directory of the file."""
    convert = partial(record_of_row, path.parent if image_root is None else image_root)
    return Records(total=count_lines(path), records=each_row(read_json_lines(path), convert))


def record_of_row(root: Path, origin: Origin, row: dict[str, Any]) -> SourceRecord:
    """Convert one row; relative file names are joined to `root`."""
    if not isinstance(row.get("messages"), list):
        raise RecordError("the field `messages` must be a list", origin, "Use OpenAI-style JSON lines.")
    named: dict[str, list[str]] = {kind: [] for kind in MEDIA_TYPES}
    messages = [_without_names(message, named) for message in row["messages"]]
    body = {"messages": messages, **extras(row, _USED)}
    images = media_paths(row.get("images", row.get("image", named["image"])), root, origin)
    videos = media_paths(row.get("videos", row.get("video", named["video"])), root, origin)
    return SourceRecord(body=body, media=media_in_order(body, images, videos, origin), origin=origin)


def _without_names(message: Any, named: dict[str, list[str]]) -> Any:
    """The message without the file names of its media parts, which are appended to `named`."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    parts = []
    for part in message["content"]:
        kind = part.get("type") if isinstance(part, dict) else None
        name = part.get(kind) if isinstance(kind, str) else None
        if kind == "image_url":
            kind, name = "image", name.get("url") if isinstance(name, dict) else name
        if kind in MEDIA_TYPES and isinstance(name, str):
            named[kind].append(name.removeprefix("file://"))
            parts.append({"type": kind})
        else:
            parts.append(part)
    return {**message, "content": parts}
