# SPDX-License-Identifier: Apache-2.0
"""Sample -> pieces of text, each marked learned or not, by the tokenizer's own Jinja template.

Comes after samples, before tokenization. The template is never taken apart: each assistant content goes through it
between two marks, and the marks are looked for in the result. Where a template rewrites what an assistant said, so
that the marks do not come through, growing prefixes of the conversation are compared instead.

Marks are Unicode noncharacters; they are removed from what users wrote, so text can forge neither a learned span nor
a picture.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mindvl_data.errors import BadSample
from mindvl_data.types import Coordinates, Image, Message, Part, Text, Video

IMAGE_MARK = "\ufdd0"  # one picture
SPLIT_MARK = "\ufdd1"  # inside a special token that a user typed; dropped when encoded, as plain text
_START_MARK = "\ufdd2"
_END_MARK = "\ufdd3"
_MARKS = re.compile("[\ufdd0-\ufddf]")
_SPANS = re.compile(f"{_START_MARK}(.*?){_END_MARK}", re.DOTALL)

Render = Callable[[list[dict[str, str]], bool], str]  # (messages, add_generation_prompt) -> text
Scale = tuple[tuple[int, int], tuple[int, int]]  # (height, width) of an original, and of the same picture resized


@dataclass(frozen=True)
class Piece:
    text: str
    learned: bool


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A template and what is needed to read its output."""

    render: Render
    special_tokens: re.Pattern[str]  # any special token of the tokenizer
    end_token: str  # ends a sample without a template

    def chat_pieces(self, messages: Sequence[Message], scales: Sequence[Scale]) -> list[Piece]:
        """A conversation; learned are the assistant's contents, each with the special token that ends it.

        Raises:
            BadSample: The template refuses the conversation, or changes it so that no learned span can be found.
        """
        plain = [{"role": m.role, "content": self._flatten(m.parts, scales)} for m in messages]
        marked = [
            m | {"content": f"{_START_MARK}{m['content']}{_END_MARK}"} if m["role"] == "assistant" else m for m in plain
        ]
        full = self._render(plain)
        found = self._render(marked)
        num_spans = sum(m["role"] == "assistant" for m in plain)
        spans = _SPANS.findall(found)
        if len(spans) == num_spans and found.replace(_START_MARK, "").replace(_END_MARK, "") == full:
            return self._cut(full, _positions(found))
        return self._cut(full, self._compare_prefixes(plain, full))

    def content_pieces(self, content: Sequence[Part], scales: Sequence[Scale]) -> list[Piece]:
        """Text and pictures without a template: all of it is learned (pictures never are), then the end token."""
        return [Piece(self._flatten(content, scales), True), Piece(self.end_token, True)]

    def _flatten(self, parts: Sequence[Part], scales: Sequence[Scale]) -> str:
        pieces = []
        for part in parts:
            if isinstance(part, Text):
                pieces.append(_MARKS.sub("\ufffd", part.text))
            elif isinstance(part, Image | Video):
                pieces.append(IMAGE_MARK)
            else:
                pieces.append(coordinates_text(part, scales[part.image]))
        text = "".join(pieces)
        return self.special_tokens.sub(lambda match: match[0][:1] + SPLIT_MARK + match[0][1:], text)

    def _render(self, messages: list[dict[str, str]], generation_prompt: bool = False) -> str:
        try:
            return self.render(messages, generation_prompt)
        except Exception as error:  # a template is a foreign program; whatever it raises means it refuses the sample
            raise BadSample(f"chat template refuses the conversation: {error}") from error

    def _compare_prefixes(self, messages: list[dict[str, str]], full: str) -> list[tuple[int, int]]:
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:number], True)
            after = full if number == len(messages) - 1 else self._render(messages[: number + 1])
            if not full.startswith(before) or not full.startswith(after) or len(before) >= len(after):
                raise BadSample(
                    f"chat template rewrites message {number} of the assistant, so what is learned cannot be told apart"
                )
            turn = full[len(before) : len(after)].rstrip()
            endings = [match for match in self.special_tokens.finditer(turn) if match.end() == len(turn)]
            spans.append((len(before), len(before) + (endings[0].start() if endings else len(turn))))
        return spans

    def _cut(self, text: str, spans: list[tuple[int, int]]) -> list[Piece]:
        pieces, position = [], 0
        for start, stop in spans:
            ending = self.special_tokens.match(text, stop)
            if ending is None:  # some templates put a space before the end token
                spaced = re.compile(r"\s*" + re.escape(self.end_token)).match(text, stop)
                stop = spaced.end() if spaced else stop
            else:
                stop = ending.end()
            pieces += [Piece(text[position:start], False), Piece(text[start:stop], True)]
            position = stop
        pieces.append(Piece(text[position:], False))
        return [piece for piece in pieces if piece.text]


def coordinates_text(part: Coordinates, scale: Scale) -> str:
    """`(x,y)` for a point, `(x1,y1),(x2,y2)` for a box: whole pixels of the resized picture, as Qwen2.5-VL has them.

    Values outside the picture are moved to its border.
    """
    (height, width), (new_height, new_width) = scale
    limits = ((width, new_width), (height, new_height)) * 2
    moved = [min(max(round(v * new / old), 0), new) for v, (old, new) in zip(part.values, limits, strict=False)]
    return ",".join(f"({x},{y})" for x, y in zip(moved[::2], moved[1::2], strict=True))


def _positions(marked: str) -> list[tuple[int, int]]:
    """Spans between the marks, as positions in the same text without marks."""
    return [
        (match.start() - 2 * number, match.end() - 2 * number - 2)
        for number, match in enumerate(_SPANS.finditer(marked))
    ]
