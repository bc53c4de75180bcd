# SPDX-License-Identifier: Apache-2.0
"""RawSample -> Sample: parse and check a record.

Comes after shards, before tokenization; the writers use the same checks, so that every written record can be read.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

from mindvl_data.errors import SampleError
from mindvl_data.formats.foreign import to_record
from mindvl_data.preprocessing import WITHOUT_MODEL
from mindvl_data.types import Coordinates, Image, Message, Part, RawSample, Role, Sample, Text, Video

MAX_RECORD_BYTES = 8_000_000  # more than any packed sequence holds; still parsed and encoded in seconds

_ROLES = get_args(Role)
_MIN_PIXELS = WITHOUT_MODEL.token_pixels  # one visual token of the smallest kind
_MAX_PIXELS = 1 << 31


def parse_sample(raw: RawSample) -> Sample:
    """Parse and check a record.

    Raises:
        SampleError: The record is not valid JSON or not a valid sample, or does not match its media.
    """
    check_record_size(len(raw.record))
    try:
        text = raw.record.decode("utf-8")
        record = json.loads(text) if raw.is_json else {"content": [*_media_parts(raw), text]}
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise SampleError(f"record cannot be read: {error}") from error
    record = to_record(record, [part["type"] for part in _media_parts(raw)])
    num_videos = sum(size.frames > 0 for size in raw.sizes)
    sample = parse_record(record, num_images=len(raw.sizes) - num_videos, num_videos=num_videos)
    for part in _parts(sample):
        if isinstance(part, Image | Video) and isinstance(part, Video) != (raw.sizes[part.index].frames > 0):
            kinds = ("an image", "a video") if isinstance(part, Image) else ("a video", "an image")
            raise SampleError(f"text mentions {kinds[0]}, but medium {part.index} is {kinds[1]}")
    return sample


def check_record_size(num_bytes: int) -> None:
    """Refuse a record before it is parsed.

    Raises:
        SampleError: The record has more than MAX_RECORD_BYTES.
    """
    if num_bytes > MAX_RECORD_BYTES:
        raise SampleError(f"record has {num_bytes} bytes, more than the limit of {MAX_RECORD_BYTES}")


def parse_record(record: Any, *, num_images: int, num_videos: int = 0) -> Sample:
    """Check a record.

    Args:
        record: Object with `messages` (a conversation) or `content` (text and images without a template), and
            optionally `tools`, and `min_pixels` and `max_pixels`, which limit the images of this record.
        num_images: Number of images of the sample.
        num_videos: Number of videos of the sample.

    Raises:
        SampleError: The record is not valid, or does not refer to each image and video once.
    """
    if not isinstance(record, dict) or ("messages" in record) == ("content" in record):
        raise SampleError("record must have either `messages` or `content`")
    reader = _PartReader()
    messages: tuple[Message, ...] = ()
    content: tuple[Part, ...] = ()
    if "messages" in record:
        messages = _parse_messages(record["messages"], reader)
    else:
        content = reader.read(record["content"])
        if not any(isinstance(part, Text) and part.text.strip() for part in content):
            raise SampleError("`content` has no text to train on")
    for found, expected, kind in ((reader.num_images, num_images, "images"), (reader.num_videos, num_videos, "videos")):
        if found != expected:
            raise SampleError(f"text mentions {found} {kind}, but the sample has {expected}")
    if reader.highest_reference >= num_images:
        raise SampleError(
            f"coordinates refer to image {reader.highest_reference}, but the sample has {num_images} images"
        )
    low, high = _pixel_limit(record, "min_pixels"), _pixel_limit(record, "max_pixels")
    if low is not None and high is not None and low > high:
        raise SampleError(f"min_pixels={low} is greater than max_pixels={high}")
    return Sample(
        messages=messages,
        content=content,
        tools=_objects(record.get("tools"), "`tools`"),
        num_images=num_images,
        num_videos=num_videos,
        has_coordinates=reader.highest_reference >= 0,
        min_pixels=low,
        max_pixels=high,
    )


def num_turns(sample: Sample) -> int:
    """Number of turns of a conversation; a turn is a user message and all messages up to the next one."""
    return len(_turn_starts(sample))


def cut_turns(sample: Sample, keep: int) -> Sample:
    """Keep the messages up to the end of turn `keep` (>= 1) of a conversation, and their media.

    Raises:
        SampleError: The kept turns have no assistant message, or coordinates of an image that was removed.
    """
    starts = _turn_starts(sample)
    kept = replace(sample, messages=sample.messages[: starts[keep]] if keep < len(starts) else sample.messages)
    parts = list(_parts(kept))
    kept = replace(
        kept,
        num_images=sum(isinstance(part, Image) for part in parts),
        num_videos=sum(isinstance(part, Video) for part in parts),
        has_coordinates=any(isinstance(part, Coordinates) for part in parts),
    )
    if not any(message.role == "assistant" for message in kept.messages):
        raise SampleError(f"the first {keep} of {len(starts)} turns contain no assistant message")
    if any(isinstance(part, Coordinates) and part.image >= kept.num_images for part in parts):
        raise SampleError(f"the first {keep} of {len(starts)} turns contain coordinates of an image of a later turn")
    return kept


def _turn_starts(sample: Sample) -> list[int]:
    return [number for number, message in enumerate(sample.messages) if message.role == "user"]


def _parts(sample: Sample) -> Iterator[Part]:
    yield from sample.content
    for message in sample.messages:
        yield from message.parts


def _media_parts(raw: RawSample) -> list[dict[str, str]]:
    """The parts of a plain text's images and videos, which precede it."""
    return [{"type": "video" if size.frames else "image"} for size in raw.sizes]


def _pixel_limit(record: dict[str, Any], name: str) -> int | None:
    value = record.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not _MIN_PIXELS <= value < _MAX_PIXELS:
        raise SampleError(f"{name} must be an integer from {_MIN_PIXELS} to {_MAX_PIXELS - 1}, got {str(value)[:40]!r}")
    return value


def _parse_messages(value: Any, reader: "_PartReader") -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise SampleError("`messages` must be a list of at least one message")
    messages = []
    for number, item in enumerate(value):
        role: Any = item.get("role") if isinstance(item, dict) else None
        if role not in _ROLES:
            raise SampleError(f"message {number}: role must be one of {', '.join(_ROLES)}, got {str(role)[:40]!r}")
        reasoning = item.get("reasoning_content")
        calls = _objects(item.get("tool_calls"), f"`tool_calls` of message {number}")
        if role != "assistant" and (reasoning or calls):
            raise SampleError(
                f"message {number} has role {role}, but only assistant messages may have `reasoning_content` or "
                "`tool_calls`"
            )
        content = item.get("content")
        parts = reader.read("" if content is None and calls else content)
        if role == "assistant":
            if any(isinstance(part, Image | Video) for part in parts):
                raise SampleError(f"message {number} of the assistant contains an image or a video")
            if not calls and all(isinstance(part, Text) and not part.text.strip() for part in parts):
                raise SampleError(f"message {number} of the assistant is empty")
        checked = "" if reasoning is None else _checked_text(reasoning)
        messages.append(Message(role=role, parts=parts, reasoning=checked, tool_calls=calls))
    if not any(message.role == "assistant" for message in messages):
        raise SampleError("`messages` has no assistant message to train on")
    return tuple(messages)


def _objects(value: Any, name: str) -> tuple[dict[str, Any], ...]:
    """Check a list of JSON objects, which may be a string of JSON."""
    if isinstance(value, str) and value:
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise SampleError(f"{name} is not valid JSON: {error}") from error
    if not value:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise SampleError(f"{name} must be a list of objects, got {type(value).__name__}")
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except (ValueError, RecursionError) as error:  # a lone surrogate raises a ValueError
        raise SampleError(f"{name} cannot be encoded: {error}") from error
    return tuple(value)


class _PartReader:
    """Converts content values to parts and counts the images and videos of one sample."""

    def __init__(self) -> None:
        self.num_images = 0
        self.num_videos = 0
        self.highest_reference = -1

    def read(self, content: Any) -> tuple[Part, ...]:
        items = [content] if isinstance(content, str) else content
        if not isinstance(items, list):
            raise SampleError(f"content must be a string or a list of parts, got {type(content).__name__}")
        return tuple(self._read_part(item) for item in items)

    def _read_part(self, item: Any) -> Part:
        if isinstance(item, str):
            return Text(_checked_text(item))
        kind = item.get("type") if isinstance(item, dict) else None
        if kind == "text":
            return Text(_checked_text(item.get("text")))
        if kind == "image":
            self.num_images += 1
            return Image(self.num_images + self.num_videos - 1)
        if kind == "video":
            self.num_videos += 1
            return Video(self.num_images + self.num_videos - 1)
        if kind in ("box", "point"):
            image, values = item.get("image", 0), item.get("xyxy" if kind == "box" else "xy")
            count = 4 if kind == "box" else 2
            if not isinstance(image, int) or isinstance(image, bool) or image < 0 or not _are_numbers(values, count):
                raise SampleError(f"{kind} part must have an image number and {count} finite coordinates")
            self.highest_reference = max(self.highest_reference, image)
            return Coordinates(image, tuple(float(v) for v in values))
        raise SampleError(f"part type must be text, image, video, box or point, got {str(kind)[:40]!r}")


def _checked_text(value: Any) -> str:
    if not isinstance(value, str):
        raise SampleError(f"text must be a string, got {type(value).__name__}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise SampleError(f"text has a lone surrogate at character {error.start}") from error
    return value


def _are_numbers(values: Any, count: int) -> bool:
    return (
        isinstance(values, list)
        and len(values) == count
        and all(isinstance(v, int | float) and not isinstance(v, bool) and abs(v) < 1e7 for v in values)
    )
