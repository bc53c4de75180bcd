# SPDX-License-Identifier: Apache-2.0
"""Convert conversations with placeholders in the text to messages made of parts.

Used by the input formats and by foreign.py, so that a LLaVA file and a shard of LLaVA records give the same messages.
"""

import re
from typing import Any

from mindvl_data.errors import SampleError

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}
# At most 9 digits, because int() limits the length.
_PLACEHOLDER = re.compile(r"<(image|video)>|<(box|point):(\d{1,9})>")
_MEDIA_PLACEHOLDER = re.compile(r"<(image|video)>")


def messages_of_turns(turns: Any, row: dict[str, Any]) -> list[dict[str, Any]]:
    """Convert turns of the form `{"from", "value"}`, or `{"role", "content"}` with a text.

    Args:
        turns: The list of turns.
        row: The record with `boxes` and `points`, to which `<box:N>` and `<point:N>` in the text refer.

    Raises:
        SampleError: A turn is invalid; the message gives its number.
    """
    if not isinstance(turns, list):
        raise SampleError(f"the conversation must be a list of turns, got {type(turns).__name__}")
    return [_message(turn, row, number) for number, turn in enumerate(turns)]


def parts_of_text(text: str, row: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Split a text at its placeholders into parts; without a row, `<box:0>` and `<point:0>` stay text."""
    parts: list[dict[str, Any]] = []
    position = 0
    for mark in (_PLACEHOLDER if row is not None else _MEDIA_PLACEHOLDER).finditer(text):
        if mark.start() > position:
            parts.append({"type": "text", "text": text[position : mark.start()]})
        parts.append({"type": mark[1]} if row is None or mark[1] else _coordinates(mark[2], int(mark[3]), row))
        position = mark.end()
    if position < len(text) or not parts:
        parts.append({"type": "text", "text": text[position:]})
    return parts


def _message(turn: Any, row: dict[str, Any], number: int) -> dict[str, Any]:
    fields = turn if isinstance(turn, dict) else {}
    speaker, value = fields.get("from", fields.get("role")), fields.get("value", fields.get("content"))
    if not isinstance(speaker, str) or speaker not in _ROLES or not isinstance(value, str):
        raise SampleError(
            f"turn {number} must have `from` (one of {', '.join(_ROLES)}) and a string `value`, "
            f"got {speaker!r} and {type(value).__name__}"
        )
    more = {name: fields[name] for name in ("reasoning_content", "tool_calls") if fields.get(name) is not None}
    return {"role": _ROLES[speaker], "content": parts_of_text(value, row), **more}


def _coordinates(kind: str, number: int, row: dict[str, Any]) -> dict[str, Any]:
    field = "boxes" if kind == "box" else "points"
    entries = row.get(field)
    if not isinstance(entries, list) or number >= len(entries):
        raise SampleError(f"the text refers to <{kind}:{number}>, but `{field}` has no entry {number}")
    entry, name = entries[number], "xyxy" if kind == "box" else "xy"
    image, values = (entry.get("image", 0), entry.get(name)) if isinstance(entry, dict) else (0, entry)
    return {"type": kind, "image": image, name: values}
