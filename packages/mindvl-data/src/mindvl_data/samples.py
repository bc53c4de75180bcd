# SPDX-License-Identifier: Apache-2.0
"""RawSample -> Sample: read what a record says and check it.

Comes after shards, before tokenization; the writers use the same check, so that what is written can be read.
"""

import json
from typing import Any, get_args

from mindvl_data.errors import BadSample
from mindvl_data.types import Coordinates, Image, Message, Part, RawSample, Role, Sample, Text

_ROLES = get_args(Role)


def parse_sample(raw: RawSample) -> Sample:
    """The checked content of a record.

    Raises:
        BadSample: The record is not JSON, or does not fit its pictures; the message says what, not where.
    """
    try:
        text = raw.record.decode("utf-8")
        record = json.loads(text) if raw.is_json else {"content": [*[{"type": "image"}] * len(raw.media), text]}
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise BadSample(f"record cannot be read: {error}") from error
    num_videos = sum(size.frames > 0 for size in raw.sizes)
    return parse_record(record, num_images=len(raw.sizes) - num_videos)


def parse_record(record: Any, *, num_images: int) -> Sample:
    """Check a record: `messages` for a conversation, `content` for text and pictures without a template."""
    if not isinstance(record, dict) or ("messages" in record) == ("content" in record):
        raise BadSample("record needs either `messages` or `content`")
    reader = _PartReader()
    messages: tuple[Message, ...] = ()
    content: tuple[Part, ...] = ()
    if "messages" in record:
        messages = _parse_messages(record["messages"], reader)
    else:
        content = reader.read(record["content"])
        if not any(isinstance(part, Text) and part.text for part in content):
            raise BadSample("`content` has no text to learn")
    if reader.num_images != num_images:
        raise BadSample(f"text mentions {reader.num_images} images, the sample has {num_images}")
    if reader.highest_reference >= num_images:
        raise BadSample(f"coordinates refer to image {reader.highest_reference}, the sample has {num_images}")
    return Sample(
        messages=messages,
        content=content,
        num_images=num_images,
        has_coordinates=reader.highest_reference >= 0,
    )


def _parse_messages(value: Any, reader: "_PartReader") -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise BadSample("`messages` is not a list with at least one message")
    messages = []
    for number, item in enumerate(value):
        role: Any = item.get("role") if isinstance(item, dict) else None
        if role not in _ROLES:
            raise BadSample(f"message {number} has role {role!r}; use one of {', '.join(_ROLES)}")
        parts = reader.read(item.get("content"))
        if role == "assistant":
            if any(isinstance(part, Image) for part in parts):
                raise BadSample(f"message {number} of the assistant holds an image; pictures can only be shown to it")
            if not parts or all(isinstance(part, Text) and not part.text for part in parts):
                raise BadSample(f"message {number} of the assistant is empty")
        messages.append(Message(role=role, parts=parts))
    if not any(message.role == "assistant" for message in messages):
        raise BadSample("`messages` holds no assistant message, so there is nothing to learn")
    return tuple(messages)


class _PartReader:
    """Turns content values into parts, counting images across the messages of one sample."""

    def __init__(self) -> None:
        self.num_images = 0
        self.highest_reference = -1

    def read(self, content: Any) -> tuple[Part, ...]:
        items = [content] if isinstance(content, str) else content
        if not isinstance(items, list):
            raise BadSample(f"content is {type(content).__name__}; use a string or a list of parts")
        return tuple(self._read_part(item) for item in items)

    def _read_part(self, item: Any) -> Part:
        if isinstance(item, str):
            return Text(_checked_text(item))
        kind = item.get("type") if isinstance(item, dict) else None
        if kind == "text":
            return Text(_checked_text(item.get("text")))
        if kind == "image":
            self.num_images += 1
            return Image(self.num_images - 1)
        if kind in ("box", "point"):
            image, values = item.get("image", 0), item.get("xyxy" if kind == "box" else "xy")
            count = 4 if kind == "box" else 2
            if not isinstance(image, int) or image < 0 or not _are_numbers(values, count):
                raise BadSample(f"{kind} part needs an image number and {count} finite coordinates")
            self.highest_reference = max(self.highest_reference, image)
            return Coordinates(image, tuple(float(v) for v in values))
        raise BadSample(f"part has type {kind!r}; use text, image, box or point")


def _checked_text(value: Any) -> str:
    if not isinstance(value, str):
        raise BadSample(f"text is {type(value).__name__}, not a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadSample(f"text holds a lone surrogate at character {error.start}") from error
    return value


def _are_numbers(values: Any, count: int) -> bool:
    return (
        isinstance(values, list)
        and len(values) == count
        and all(isinstance(v, int | float) and not isinstance(v, bool) and abs(v) < 1e7 for v in values)
    )
