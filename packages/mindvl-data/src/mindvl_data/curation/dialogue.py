# SPDX-License-Identifier: Apache-2.0
"""The question, the answer and the images of a record, as a model or a person is shown them.

Used by the steps that ask a model about a record or replace its answer. The answer is the text of the last message of the
assistant, or the only text of `content` (a caption).
"""

import json
from collections.abc import Iterator
from hashlib import sha256
from typing import Any, Literal

from mindvl_data.curation.record import Record
from mindvl_data.errors import SampleError

Language = Literal["record", "en", "zh"]
Parts = list[str | bytes]


def language_of(record: Record, language: Language) -> Literal["en", "zh"]:
    """The language to write in: a fixed one, or that of the fact `language`; English if it is neither or not known."""
    found = record.facts.get("language") if language == "record" else language
    return "zh" if found == "zh" else "en"


def check_language(language: str) -> None:
    """Raise ValueError unless a step may have this value of `language`."""
    if language not in ("record", "en", "zh"):
        raise ValueError(f"language: {language!r} is not known. Use record, en or zh.")


def turns(record: Record) -> list[tuple[str, Parts]]:
    """(role, texts and encoded images in order) of every message; the role of `content` is "document".

    Raises:
        SampleError: The record has a video, or not as many media as placeholders.
    """
    media = iter(record.media)
    found: list[tuple[str, Parts]] = []
    for turn in record.body.get("messages") or [{"role": "document", "content": record.body.get("content")}]:
        parts: Parts = []
        for part in _parts(turn.get("content")):
            parts.append(_shown(part, media))
        if turn.get("tool_calls"):
            parts.append(json.dumps(turn["tool_calls"], ensure_ascii=False, sort_keys=True))
        found.append((str(turn.get("role")), parts))
    if next(media, None) is not None:
        raise SampleError(f"the record has {len(record.media)} media, its text mentions fewer")
    return found


def answer(record: Record) -> str:
    """The answer that a step may judge or replace.

    Raises:
        SampleError: The record has no such answer: none at all, one that contains more than text, or several texts.
    """
    content = _answer_holder(record)["content"]
    texts = [content] if isinstance(content, str) else [part for part in content if not _is_medium(part)]
    plain = [part if isinstance(part, str) else part.get("text") for part in texts]
    if any(not isinstance(text, str) for text in plain):
        raise SampleError("the answer contains points, boxes or other parts that are not text")
    if "messages" not in record.body and len(plain) != 1:
        raise SampleError(f"the record has {len(plain)} texts and no messages, so that none of them is its answer")
    return "".join(plain)


def with_answer(record: Record, text: str) -> Record:
    """A copy with another answer; reasoning before the old answer is removed.

    Raises:
        SampleError: As in `answer`.
    """
    answer(record)
    body = record.body
    if "messages" in body:
        last = _answer_index(record)
        turn = {name: value for name, value in body["messages"][last].items() if name != "reasoning_content"}
        messages = [*body["messages"][:last], {**turn, "content": text}, *body["messages"][last + 1 :]]
        return record.with_body(messages=messages)
    if isinstance(body["content"], str):
        return record.with_body(content=text)
    parts = [part if _is_medium(part) else {"type": "text", "text": text} for part in body["content"]]
    return record.with_body(content=parts)


def question_key(record: Record) -> str:
    """Digest of the media and of everything before the answer: the same for every answer to the same question.

    Raises:
        SampleError: As in `answer`.
    """
    asked = with_answer(record, "")
    content = [
        asked.body.get("messages"),
        asked.body.get("content"),
        [sha256(medium).hexdigest() for medium in asked.media],
    ]
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _answer_index(record: Record) -> int:
    roles = [turn.get("role") for turn in record.body["messages"]]
    if "assistant" not in roles or roles[-1] != "assistant":
        raise SampleError("the last message is not one of the assistant")
    return len(roles) - 1


def _answer_holder(record: Record) -> dict[str, Any]:
    holder: dict[str, Any] = record.body
    if "messages" in holder:
        holder = holder["messages"][_answer_index(record)]
        if holder.get("tool_calls"):
            raise SampleError("the last message calls a tool instead of answering")
    if not isinstance(holder.get("content"), str | list):
        raise SampleError("the record has no answer")
    return holder


def _parts(content: Any) -> list[Any]:
    return [content] if isinstance(content, str) else list(content or ())


def _is_medium(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in ("image", "video")


def _shown(part: Any, media: Iterator[bytes]) -> str | bytes:
    if isinstance(part, str):
        return part
    kind = part.get("type")
    if kind == "image":
        medium = next(media, None)
        if medium is None:
            raise SampleError("the text mentions more images than the record has")
        return medium
    if kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    if kind in ("point", "box"):
        return json.dumps(part.get("xy" if kind == "point" else "xyxy"))
    raise SampleError(f"a part of type {kind!r} cannot be shown to a model of images and texts")
