# SPDX-License-Identifier: Apache-2.0
"""LLaVA and ShareGPT: one JSON list (or JSON lines) of conversations with `<image>` marks.

A row: `{"id", "image": NAME | [NAME, ...], "conversations": [{"from": "human", "value": "<image>\\nRead it."},
...]}`. Optional `boxes` ([x1, y1, x2, y2]) and `points` ([x, y]) hold pixels of the original picture; the text
refers to them as `<box:0>` and `<point:0>`. For another picture than the first, an entry is `{"image": 1, "xyxy":
[...]}` (or `xy`).
"""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mindvl_data.errors import DataError
from mindvl_data.formats.record import (
    Records,
    SourceRecord,
    check_object,
    count_lines,
    extras,
    image_paths,
    read_json_lines,
)

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}
_MARK = re.compile(r"<image>|<(box|point):(\d+)>")
_USED = ("image", "images", "conversations", "boxes", "points")


def read_llava(path: Path, image_root: Path | None) -> Records:
    """Records of a LLaVA or ShareGPT file; image names are relative to `image_root`, else to the file's folder."""
    root = path.parent if image_root is None else image_root
    if path.suffix == ".jsonl":
        return Records(total=count_lines(path), records=_records(read_json_lines(path), root))
    rows = _load_list(path)
    numbered = ((where := f"{path} row {number}", check_object(row, where)) for number, row in enumerate(rows, 1))
    return Records(total=len(rows), records=_records(numbered, root))


def _records(rows: Iterable[tuple[str, dict[str, Any]]], root: Path) -> Iterator[SourceRecord]:
    for where, row in rows:
        turns = row.get("conversations")
        if not isinstance(turns, list):
            raise DataError(f"row has no list `conversations`. {where}. Is this a LLaVA or ShareGPT file?")
        messages = [_message(turn, row, f"{where} turn {number}") for number, turn in enumerate(turns)]
        images = image_paths(row.get("image", row.get("images")), root, where)
        yield SourceRecord(body={"messages": messages, **extras(row, _USED)}, images=images, where=where)


def _load_list(path: Path) -> list[Any]:
    if not path.is_file():
        raise DataError(f"file does not exist. {path}. Name a LLaVA or ShareGPT JSON file.")
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"broken JSON: {error}. {path}. Mend the file.") from error
    if not isinstance(rows, list):
        raise DataError(f"file holds {type(rows).__name__} instead of a list. {path}. Use a list of rows, or .jsonl.")
    return rows


def _message(turn: Any, row: dict[str, Any], where: str) -> dict[str, Any]:
    speaker, value = (turn.get("from"), turn.get("value")) if isinstance(turn, dict) else (None, None)
    if speaker not in _ROLES or not isinstance(value, str):
        raise DataError(
            f"turn is from {speaker!r}. {where}. Use `from` (one of {', '.join(_ROLES)}) and a text `value`."
        )
    parts: list[dict[str, Any]] = []
    position = 0
    for mark in _MARK.finditer(value):
        if mark.start() > position:
            parts.append({"type": "text", "text": value[position : mark.start()]})
        parts.append({"type": "image"} if mark[1] is None else _coordinates(mark[1], int(mark[2]), row, where))
        position = mark.end()
    if position < len(value) or not parts:
        parts.append({"type": "text", "text": value[position:]})
    return {"role": _ROLES[speaker], "content": parts}


def _coordinates(kind: str, number: int, row: dict[str, Any], where: str) -> dict[str, Any]:
    field = "boxes" if kind == "box" else "points"
    entries = row.get(field)
    if not isinstance(entries, list) or number >= len(entries):
        raise DataError(f"text refers to <{kind}:{number}>, which `{field}` does not hold. {where}. Mend the row.")
    entry, name = entries[number], "xyxy" if kind == "box" else "xy"
    image, values = (entry.get("image", 0), entry.get(name)) if isinstance(entry, dict) else (0, entry)
    return {"type": kind, "image": image, name: values}
