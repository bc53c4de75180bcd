# SPDX-License-Identifier: Apache-2.0
"""Records that others wrote -> records as samples.py reads them.

Called on every record of a shard and on the rows of table formats (parquet), so that a field name means the same
everywhere. The first line that fits decides; the names and their order are part of docs/reference/data-format.md:

1. `content`, or `messages`: a record of ours, or OpenAI-style; see `_messages`.
2. `conversations`, or a bare list of turns: LLaVA, energon's LLaVA example; marks say where images are.
3. `texts`: turns of `user` and `assistant` (The Cauldron), images first.
4. A question and an answer, images first: energon's VQA and most tables.
5. A caption, images first.
"""

from collections.abc import Sequence
from typing import Any

from mindvl_data.errors import SampleError
from mindvl_data.formats.turns import messages_of_turns, parts_of_text

QUESTION_FIELDS = ("question", "context", "prompt", "instruction", "query")
ANSWER_FIELDS = ("answer", "answers", "response", "output", "label", "labels")
CAPTION_FIELDS = ("caption", "captions", "text")
OWN_FIELDS = ("min_pixels", "max_pixels", "tools")  # of a record, besides its text and media

_MEDIA_PARTS = {"image": "image", "image_url": "image", "video": "video", "video_url": "video"}


def own_record(record: Any, media: Sequence[str]) -> Any:
    """The record with `messages` or `content`; what is of no known shape comes back as it is.

    Args:
        media: "image" or "video" for each image and video of the sample, in order.

    Raises:
        SampleError: The shape is known, but not what it holds.
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
        return {"messages": [_turn("user", question, shown), _turn("assistant", answer, [])], **own}
    caption = _first(record, CAPTION_FIELDS)
    return record if caption is None else {"content": [*shown, caption], **own}


def says_its_media(record: Any) -> bool:
    """Whether a record tells how many images and videos belong to it, so that a lost one is noticed."""
    return isinstance(record, list) or (
        isinstance(record, dict) and any(name in record for name in ("content", "messages", "conversations"))
    )


def _messages(messages: Any, num_media: int) -> Any:
    """Messages with bare media parts and without null fields (table formats fill those in).

    Where the sample has media and no part mentions one, `<image>` and `<video>` in the text are marks, provided that
    there are as many; everywhere else they stay text, which nobody can forge images with.
    """
    if not isinstance(messages, list):
        return messages
    cleaned = [_bare(message) for message in messages]
    if num_media and not any(_mentions(message) for message in cleaned):
        marked = [_marked(message) for message in cleaned]
        if sum(_mentions(message) for message in marked) == num_media:
            return marked
    return cleaned


def _bare(message: Any) -> Any:
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


def _mentions(message: Any) -> int:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return 0
    # A tuple: what a record has as a type may be a list, which no dict can look up.
    return sum(isinstance(part, dict) and part.get("type") in (*_MEDIA_PARTS,) for part in content)


def _marked(message: Any) -> Any:
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
        raise SampleError(f"`texts` is {type(turns).__name__} instead of a list")
    messages = []
    for number, turn in enumerate(turns):
        question, answer = (turn.get("user"), turn.get("assistant")) if isinstance(turn, dict) else (None, None)
        if not isinstance(question, str) or not isinstance(answer, str):
            raise SampleError(f"`texts` {number} has no string `user` and `assistant`")
        messages += [_turn("user", question, [] if number else shown), _turn("assistant", answer, [])]
    return messages


def _turn(role: str, text: str, shown: list[dict[str, Any]]) -> dict[str, Any]:
    return {"role": role, "content": [*shown, {"type": "text", "text": text}]}


def _first(record: dict[str, Any], fields: tuple[str, ...]) -> str | None:
    """The first field that holds a text, or a list that begins with one."""
    for name in fields:
        value = record.get(name)
        if isinstance(value, list) and value:
            value = value[0]
        if isinstance(value, str) and value:
            return value
    return None
