# SPDX-License-Identifier: Apache-2.0
"""LLaVA and ShareGPT: one JSON list (or JSON lines) of conversations with `<image>` and `<video>` placeholders.

A record: `{"id", "image": NAME | [NAME, ...], "conversations": [{"from": "human", "value": "<image>\\nRead it."},
...]}`, and the same with `video`. Optional `boxes` ([x1, y1, x2, y2]) and `points` ([x, y]) are in pixels of the
original image; the text refers to them as `<box:0>` and `<point:0>`. For an image other than the first, an entry is
`{"image": 1, "xyxy": [...]}` (or `xy`).
"""

import json
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from mindvl_data.errors import DataError
from mindvl_data.formats.record import (
    Origin,
    RecordError,
    Records,
    Row,
    SourceRecord,
    count_lines,
    each_row,
    extras,
    media_in_order,
    media_paths,
    open_source,
    read_json_lines,
)
from mindvl_data.formats.turns import messages_of_turns

_USED = ("image", "images", "video", "videos", "conversations", "boxes", "points")


def read_llava(path: Path, image_root: Path | None) -> Records:
    """Read a LLaVA or ShareGPT file; file names are relative to `image_root` or else to the directory of the file."""
    convert = partial(record_of_row, path.parent if image_root is None else image_root)
    if path.suffix == ".jsonl":
        return Records(total=count_lines(path), records=each_row(read_json_lines(path), convert))
    rows = _load_list(path)
    return Records(total=len(rows), records=each_row(_numbered(rows, path), convert))


def record_of_row(root: Path, origin: Origin, row: dict[str, Any]) -> SourceRecord:
    """Convert one row; relative file names are joined to `root`."""
    if not isinstance(row.get("conversations"), list):
        raise RecordError("the field `conversations` must be a list", origin, "Use a LLaVA or ShareGPT file.")
    body = {"messages": messages_of_turns(row["conversations"], row), **extras(row, _USED)}
    images = media_paths(row.get("image", row.get("images")), root, origin)
    videos = media_paths(row.get("video", row.get("videos")), root, origin)
    return SourceRecord(body=body, media=media_in_order(body, images, videos, origin), origin=origin)


def _load_list(path: Path) -> list[Any]:
    if not path.is_file():
        raise DataError(f"{path}: the file does not exist. Specify a LLaVA or ShareGPT JSON file.")
    try:
        with open_source(path) as file:
            rows = json.loads(file.read().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: invalid JSON ({error}). Correct the file.") from error
    if not isinstance(rows, list):
        raise DataError(
            f"{path}: the file must hold a JSON list, got {type(rows).__name__}. Use a list, or JSON lines (.jsonl)."
        )
    return rows


def _numbered(rows: Iterable[Any], path: Path) -> Iterator[Row | RecordError]:
    for number, row in enumerate(rows, 1):
        origin = Origin(path, number)
        if isinstance(row, dict):
            yield origin, row
        else:
            yield RecordError(f"the record must be an object, got {type(row).__name__}", origin)
