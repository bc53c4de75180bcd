# SPDX-License-Identifier: Apache-2.0
"""Conversations as JSON lines or as a JSON list, whichever tool wrote them: the formats `llava` and `messages`.

Both names read all of these records:

- `conversations`: LLaVA and ShareGPT, `{"from", "value"}` turns with `<image>` and `<video>` placeholders. Optional `boxes`
  ([x1, y1, x2, y2]) and `points` ([x, y]) are in pixels of the original image; the text refers to them as `<box:0>` and
  `<point:0>`. For an image other than the first, an entry is `{"image": 1, "xyxy": [...]}` (or `xy`);
- `messages`: OpenAI style, `{"role", "content"}`, where content is a text, also with placeholders (LLaMA-Factory, ms-swift), or a
  list of parts (`text`, `image`, `video`, `box`, `point`, see samples.py), which may hold file names, data URLs or addresses;
- `instruction`, `input`, `output`, `system`, `history`: Alpaca;
- a question and an answer, or a caption, with names of media, as in tables (columns.py).

Media are listed in `image(s)` and `video(s)`. If no text mentions them, they precede the first text of the user.
"""

from functools import partial
from pathlib import Path
from typing import Any

from mindvl_data.errors import SampleError
from mindvl_data.formats.columns import column_record, with_media_apart
from mindvl_data.formats.foreign import ANSWER_FIELDS, CAPTION_FIELDS, QUESTION_FIELDS
from mindvl_data.formats.record import (
    MEDIA_TYPES,
    Origin,
    RecordError,
    Records,
    SourceRecord,
    each_row,
    extras,
    media_in_order,
    media_paths,
    read_json,
)
from mindvl_data.formats.table import named_media
from mindvl_data.formats.turns import messages_of_turns, parts_of_text

_USED = ("messages", "conversations", "image", "images", "video", "videos", "boxes", "points")
_ALPACA = ("instruction", "input", "output", "system", "history")


def read_conversations(path: Path, image_root: Path | None) -> Records:
    """Read a file; names of media are relative to `image_root` or else to the directory of the file."""
    total, rows = read_json(path)
    root = path.parent if image_root is None else image_root
    return Records(total=total, records=each_row(rows, partial(conversation_record, root)))


def conversation_record(root: Path, origin: Origin, row: dict[str, Any]) -> SourceRecord:
    """Convert a row.

    Args:
        root: Directory that file names are relative to.
        origin: Place of the row.
        row: The record.

    Raises:
        RecordError: The row is none of these kinds, or a field is invalid.
        SampleError: A turn is invalid.
    """
    _refuse_grounding(row, origin)
    named: dict[str, list[str]] = {kind: [] for kind in MEDIA_TYPES}
    used: tuple[str, ...] = _USED
    if isinstance(row.get("conversations"), list):
        messages = messages_of_turns(row["conversations"], row)
    elif isinstance(row.get("messages"), list):
        messages = [_without_names(message, named) for message in row["messages"]]
    elif isinstance(row.get("instruction"), str) and isinstance(row.get("output"), str):
        messages, used = _alpaca(row), (*_USED, *_ALPACA)
    elif is_table_row(row):
        return column_record(root, origin, with_media_apart(row, named_media(list(row))))
    else:
        raise RecordError(
            f"the record needs a list `messages` or `conversations`, `instruction` with `output`, a question with an answer, or "
            f"a caption, got {', '.join(map(repr, list(row)[:8])) or 'no fields'}",
            origin,
            "Use one of these.",
        )
    images = media_paths(row.get("images", row.get("image")) or named["image"], root, origin)
    videos = media_paths(row.get("videos", row.get("video")) or named["video"], root, origin)
    messages = _with_media(messages, len(images), len(videos))
    body = {"messages": messages, **extras(row, used)}
    return SourceRecord(body=body, media=media_in_order(body, images, videos, origin), origin=origin)


def is_table_row(row: dict[str, Any]) -> bool:
    """Whether a record has a question and an answer, or a caption, under the names of tables."""
    return bool(row.keys() & {*CAPTION_FIELDS} or (row.keys() & {*QUESTION_FIELDS} and row.keys() & {*ANSWER_FIELDS}))


def _refuse_grounding(row: dict[str, Any], origin: Origin) -> None:
    """Refuse boxes of ms-swift, whose placeholders would be trained on as text."""
    objects = row.get("objects")
    if isinstance(objects, dict) and objects.keys() & {"bbox", "ref"}:
        raise RecordError(
            "`objects` of ms-swift, to which <ref-object> and <bbox> refer, is not read",
            origin,
            "Write the names into the text and the boxes as `boxes`, in pixels, with <box:0> in a turn of `conversations`.",
        )


def _with_media(messages: list[Any], num_images: int, num_videos: int) -> list[Any]:
    """The messages with a part for each medium, unless parts mention media already."""
    wanted = {"image": num_images, "video": num_videos}
    if not any(wanted.values()) or any(_kinds(message) for message in messages):
        return messages
    marked = [_with_placeholders(message) for message in messages]
    found = [kind for message in marked for kind in _kinds(message)]
    if {kind: found.count(kind) for kind in MEDIA_TYPES} == wanted:
        return marked
    first = next((place for place, message in enumerate(messages) if _is_of_user(message)), None)
    if found or first is None:
        return messages  # the number differs, or no user turn exists: the check of the record refuses it
    parts = [{"type": kind} for kind in MEDIA_TYPES for _ in range(wanted[kind])]
    content = messages[first]["content"]
    parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return [*messages[:first], {**messages[first], "content": parts}, *messages[first + 1 :]]


def _is_of_user(message: Any) -> bool:
    return (
        isinstance(message, dict) and message.get("role") == "user" and isinstance(message.get("content"), str | list)
    )


def _with_placeholders(message: Any) -> Any:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, str):
        return message
    return {**message, "content": parts_of_text(content, None)}


def _kinds(message: Any) -> list[str]:
    content = message.get("content") if isinstance(message, dict) else None
    parts = content if isinstance(content, list) else []
    return [part["type"] for part in parts if isinstance(part, dict) and part.get("type") in (*MEDIA_TYPES,)]


def _without_names(message: Any, named: dict[str, list[str]]) -> Any:
    """The message without the file names of its media parts, which are appended to `named`."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    parts = []
    for part in message["content"]:
        kind = part.get("type") if isinstance(part, dict) else None
        name = part.get(kind) if isinstance(kind, str) else None
        if kind in ("image_url", "video_url"):
            kind, name = kind.removesuffix("_url"), name.get("url") if isinstance(name, dict) else name
        if kind in MEDIA_TYPES and isinstance(name, str):
            named[kind].append(name)
            parts.append({"type": kind})
        else:
            parts.append(part)
    return {**message, "content": parts}


def _alpaca(row: dict[str, Any]) -> list[dict[str, Any]]:
    history = row.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise SampleError(f"`history` must be a list of pairs of texts, got {history!r:.80}")
    question = "\n".join(text for text in (row["instruction"], row.get("input")) if text)
    system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    pairs = [*history, [question, row["output"]]]
    return system + [
        {"role": role, "content": text}
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
