# SPDX-License-Identifier: Apache-2.0
"""The record that curation steps receive and return.

Comes after the input readers and before the steps (step.py); the output writer stores `body` as KEY.json and `media` beside
it, in the record format of docs/reference/data-format.md.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mindvl_data.config import ImageConfig
from mindvl_data.decoding import opened
from mindvl_data.errors import SampleError


@dataclass(frozen=True, kw_only=True)
class Record:
    """One sample or document on its way through the steps. Steps never modify it; they return a changed copy.

    Attributes:
        number: Position in the input: number of the part in the high 32 bits, position in the part in the low 32 bits.
            It does not depend on the engine or the number of workers. Records made from one record (pages of a PDF)
            share its number and differ in `piece`.
        piece: Position among the records made from one input record, from 0.
        id: Source, unit and position, as shown to users: `photos/shard-000003.tar:000017`, `scans/report.pdf:page 4`.
        body: Content of KEY.json: `messages` or `content`, and optionally `id` and `meta`; may hold other fields of the
            source (`url`, `alt_text`) until the writer moves them to `meta`.
        media: Encoded images and videos, or a document (PDF), in the order of their placeholders in `body`.
        facts: Values that steps measured, by name: numbers, strings, booleans, or lists of them. Written to
            `meta.curation` and drawn as histograms.
    """

    number: int
    piece: int = 0
    id: str
    body: dict[str, Any]
    media: tuple[bytes, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    _pixels: dict[int, NDArray[np.uint8]] = field(default_factory=dict, repr=False, compare=False)

    def with_facts(self, **facts: Any) -> Self:
        """A copy with more facts."""
        return replace(self, facts={**self.facts, **facts})

    def with_body(self, **fields: Any) -> Self:
        """A copy with other fields in `body`; None removes a field."""
        body = {**self.body, **fields}
        return replace(self, body={name: value for name, value in body.items() if value is not None})

    def with_media(self, media: tuple[bytes, ...]) -> Self:
        """A copy with other media."""
        return replace(self, media=media, _pixels={})

    def image(self, index: int = 0) -> NDArray[np.uint8]:
        """The decoded image [H, W, 3], upright RGB, as training decodes it; decoded once per record. Do not modify it.

        Raises:
            SampleError: There is no such image, or it is damaged or needs more memory than the limit allows.
        """
        if index >= len(self.media):
            raise SampleError(f"the record has {len(self.media)} media, none at position {index}")
        if index not in self._pixels:
            with opened(self.media[index], decode_limit=ImageConfig().decode_limit) as image:
                pixels = np.array(image.rows(0, image.height)[..., :3])
            self._pixels[index] = pixels
        return self._pixels[index]

    def texts(self) -> list[str]:
        """All texts to train on, in order: text of `content`, or of every message. Without placeholders of media."""
        return [text for _, text in _texts(self.body)]

    def text(self) -> str:
        """All texts to train on, joined by line ends."""
        return "\n".join(self.texts())

    def answers(self) -> list[str]:
        """Texts of the assistant; all texts if the record has `content`."""
        return [text for role, text in _texts(self.body) if role in ("assistant", None)]

    def map_texts(self, change: Any) -> Self:
        """A copy with `change(text)` in place of every text to train on."""
        body = dict(self.body)
        if "messages" in body:
            body["messages"] = [{**turn, "content": _mapped(turn.get("content"), change)} for turn in body["messages"]]
        if "content" in body:
            body["content"] = _mapped(body["content"], change)
        return replace(self, body=body)


def _texts(body: dict[str, Any]) -> Iterator[tuple[str | None, str]]:
    """(role, text) of every text; the role is None in `content`."""
    contents: list[tuple[str | None, Any]] = [
        (turn.get("role"), turn.get("content")) for turn in body.get("messages") or () if isinstance(turn, dict)
    ]
    contents += [(None, body["content"])] if "content" in body else []
    for role, content in contents:
        for part in [content] if isinstance(content, str) else content or ():
            if isinstance(part, str):
                yield role, part
            elif isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
                yield role, part["text"]


def _mapped(content: Any, change: Any) -> Any:
    if isinstance(content, str):
        return change(content)
    if not isinstance(content, list):
        return content
    parts: list[Any] = []
    for part in content:
        if isinstance(part, str):
            parts.append(change(part))
        elif isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
            parts.append({**part, "text": change(part["text"])})
        else:
            parts.append(part)
    return parts
