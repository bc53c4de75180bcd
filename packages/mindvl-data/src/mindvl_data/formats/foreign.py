# SPDX-License-Identifier: Apache-2.0
"""Convert records of other formats to the record format that samples.py reads.

Called on every record of a shard and on the rows of table formats (parquet), so that a field name has one meaning
everywhere. The first rule that matches is used; the rules and their order are part of docs/reference/data-format.md:

1. `content` or `messages`: a mindvl or OpenAI-style record; see `_messages`.
2. `conversations`, or a bare list of turns: LLaVA, energon's LLaVA example; placeholders mark the images.
3. `texts`: turns of `user` and `assistant` (The Cauldron), images first.
4. A question and an answer, images first: energon's VQA and most tables.
5. A caption, images first.
"""

from collections.abc import Sequence
from typing import Any

from mindvl_data.errors import SampleError
from mindvl_data.formats.turns import messages_of_turns, parts_of_text

QUESTION_FIELDS = ("question", "context", "prompt", "instruction", "query")
ANSWER_FIELDS = ("answer", "answers", "response", "output", "completion", "label", "labels")
CAPTION_FIELDS = ("caption", "captions", "text")
OWN_FIELDS = ("min_pixels", "max_pixels", "tools")  # mindvl fields that are kept in every format

_MEDIA_PARTS = {"image": "image", "image_url": "image", "video": "video", "video_url": "video"}


def to_record(record: Any, media: Sequence[str]) -> Any:
    """Convert a record to one with `messages` or `content`; a record that matches no rule is returned unchanged.

    Args:
        record: The parsed JSON.
        media: "image" or "video" for each image and video of the sample, in order.

    Raises:
        SampleError: The record matches a rule, but a field is invalid.
    """
    if isinstance(record, list):
        return {"messages": messages_of_turns(record, {})}
    if not isinstance(record, dict) or "content" in record:
        return record
    own = {name: record[name] for name in OWN_FIELDS if record.get(name) is not None}
    if "messages" in record:
        return {**record, "messages": _messages(record["messages"], len(media))}
    if "conversations" in record:
        return {"messages": messages_of_turns(record["conversations"], record), **own}
    shown = [{"type": kind} for kind in media]
    if "texts" in record:
        return {"messages": _cauldron(record["texts"], shown), **own}
    question, answer = _first(record, QUESTION_FIELDS), _first(record, ANSWER_FIELDS)
    if question is not None and answer is not None:
        if question == record.get("instruction") and isinstance(record.get("input"), str) and record["input"]:
            question = f"{question}\n{record['input']}"  # Alpaca
        return {"messages": [_turn("user", question, shown), _turn("assistant", answer, [])], **own}
    caption = _first(record, CAPTION_FIELDS)
    return record if caption is None else {"content": [*shown, caption], **own}


def states_its_media(record: Any) -> bool:
    """Whether a record states how many images and videos belong to it, so that a missing one is detected."""
    return isinstance(record, list) or (
        isinstance(record, dict) and any(name in record for name in ("content", "messages", "conversations"))
    )


def _messages(messages: Any, num_media: int) -> Any:
    """Normalize messages: media parts without file names, and no null fields (table formats add them).

    If the sample has media, no part mentions one, and the text has exactly as many `<image>` and `<video>`, these are
    placeholders. Otherwise they stay text, so that a text cannot inject images.
    """
    if not isinstance(messages, list):
        return messages
    cleaned = [_normalized(message) for message in messages]
    if num_media and not any(_count_media(message) for message in cleaned):
        marked = [_with_placeholders(message) for message in cleaned]
        if sum(_count_media(message) for message in marked) == num_media:
            return marked
    return cleaned


def _normalized(message: Any) -> Any:
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    parts: list[Any] = []
    for part in message["content"]:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in _MEDIA_PARTS:
            parts.append({"type": _MEDIA_PARTS[kind]})
        elif isinstance(part, dict):
            parts.append({name: value for name, value in part.items() if value is not None})
        else:
            parts.append(part)
    return {**message, "content": parts}


def _count_media(message: Any) -> int:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return 0
    # A tuple, because the type in a record may be a list, which is not hashable.
    return sum(isinstance(part, dict) and part.get("type") in (*_MEDIA_PARTS,) for part in content)


def _with_placeholders(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    content = message.get("content")
    pieces = [content] if isinstance(content, str) else content if isinstance(content, list) else None
    if pieces is None:
        return message
    parts: list[Any] = []
    for piece in pieces:
        text = piece.get("text") if isinstance(piece, dict) and piece.get("type") == "text" else piece
        parts += parts_of_text(text, None) if isinstance(text, str) else [piece]
    return {**message, "content": parts}


def _cauldron(turns: Any, shown: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not isinstance(turns, list):
        raise SampleError(f"`texts` must be a list, got {type(turns).__name__}")
    messages = []
    for number, turn in enumerate(turns):
        question, answer = (turn.get("user"), turn.get("assistant")) if isinstance(turn, dict) else (None, None)
        if not isinstance(question, str) or not isinstance(answer, str):
            raise SampleError(f"`user` and `assistant` in entry {number} of `texts` must be strings")
        messages += [_turn("user", question, [] if number else shown), _turn("assistant", answer, [])]
    return messages


def _turn(role: str, text: str, shown: list[dict[str, Any]]) -> dict[str, Any]:
    return {"role": role, "content": [*shown, {"type": "text", "text": text}]}


def _first(record: dict[str, Any], fields: tuple[str, ...]) -> str | None:
    """The first field that is a non-empty string, or a list that begins with one."""
    for name in fields:
        value = record.get(name)
        if isinstance(value, list) and value:
            value = value[0]
        if isinstance(value, str) and value:
            return value
    return None
