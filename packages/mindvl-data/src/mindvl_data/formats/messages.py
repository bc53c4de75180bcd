# SPDX-License-Identifier: Apache-2.0
"""OpenAI-style JSON lines: `{"messages": [{"role", "content"}], "images": [NAME, ...]}`.

Content is a string or a list of parts (`text`, `image`, `box`, `point`, see samples.py). An image part may name its
file (`{"type": "image", "image": NAME}`) instead of the row's `images`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mindvl_data.errors import DataError
from mindvl_data.formats.record import Records, SourceRecord, count_lines, extras, image_paths, read_json_lines


def read_messages(path: Path, image_root: Path | None) -> Records:
    """Records of a JSON lines file; image names are relative to `image_root`, else to the file's folder."""
    root = path.parent if image_root is None else image_root
    return Records(total=count_lines(path), records=_records(path, root))


def _records(path: Path, root: Path) -> Iterator[SourceRecord]:
    for where, row in read_json_lines(path):
        if not isinstance(row.get("messages"), list):
            raise DataError(f"row has no list `messages`. {where}. Is this an OpenAI-style file?")
        named: list[str] = []
        messages = [_without_names(message, named) for message in row["messages"]]
        images = image_paths(row.get("images", row.get("image", named)), root, where)
        body = {"messages": messages, **extras(row, ("messages", "images", "image"))}
        yield SourceRecord(body=body, images=images, where=where)


def _without_names(message: Any, named: list[str]) -> Any:
    """The message with its image parts bare, their file names moved to `named`."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    parts = []
    for part in message["content"]:
        if isinstance(part, dict) and part.get("type") == "image" and isinstance(part.get("image"), str):
            named.append(part["image"])
            parts.append({"type": "image"})
        else:
            parts.append(part)
    return {**message, "content": parts}
