# SPDX-License-Identifier: Apache-2.0
"""LLaVA and ShareGPT: one JSON list (or JSON lines) of conversations with `<image>` and `<video>` marks.

A row: `{"id", "image": NAME | [NAME, ...], "conversations": [{"from": "human", "value": "<image>\\nRead it."},
...]}`, likewise `video`. Optional `boxes` ([x1, y1, x2, y2]) and `points` ([x, y]) hold pixels of the original image;
the text refers to them as `<box:0>` and `<point:0>`. For another image than the first, an entry is `{"image": 1,
"xyxy": [...]}` (or `xy`).
"""

import json
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from mindvl_data.errors import DataError
from mindvl_data.formats.record import (
    Place,
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
    """Records of a LLaVA or ShareGPT file; file names are relative to `image_root`, else to the file's directory."""
    convert = partial(_record, path.parent if image_root is None else image_root)
    if path.suffix == ".jsonl":
        return Records(total=count_lines(path), records=each_row(read_json_lines(path), convert))
    rows = _load_list(path)
    return Records(total=len(rows), records=each_row(_numbered(rows, path), convert))


def _record(root: Path, place: Place, row: dict[str, Any]) -> SourceRecord:
    if not isinstance(row.get("conversations"), list):
        raise RecordError("row has no list `conversations`", place, "Is this a LLaVA or ShareGPT file?")
    body = {"messages": messages_of_turns(row["conversations"], row), **extras(row, _USED)}
    images = media_paths(row.get("image", row.get("images")), root, place)
    videos = media_paths(row.get("video", row.get("videos")), root, place)
    return SourceRecord(body=body, media=media_in_order(body, images, videos, place), place=place)


def _load_list(path: Path) -> list[Any]:
    if not path.is_file():
        raise DataError(f"file does not exist. {path}. Name a LLaVA or ShareGPT JSON file.")
    try:
        with open_source(path) as file:
            rows = json.loads(file.read().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"broken JSON: {error}. {path}. Mend the file.") from error
    if not isinstance(rows, list):
        raise DataError(f"file holds {type(rows).__name__} instead of a list. {path}. Use a list of rows, or .jsonl.")
    return rows


def _numbered(rows: Iterable[Any], path: Path) -> Iterator[Row | RecordError]:
    for number, row in enumerate(rows, 1):
        place = Place(path, number)
        if isinstance(row, dict):
            yield place, row
        else:
            yield RecordError(f"row is {type(row).__name__} instead of an object", place)
