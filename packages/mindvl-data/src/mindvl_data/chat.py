# SPDX-License-Identifier: Apache-2.0
"""Sample -> pieces of text, each marked learned or not, by the tokenizer's own Jinja template.

Comes after samples, before tokenization. The template is never taken apart: each assistant content goes through it
between two marks, and the marks are looked for in the result. What is learned begins where the template's own
generation prompt ends and goes up to the token that ends the turn: exactly what the model has to say when it is asked.
So what a template puts between prompt and content (Qwen3's empty thinking) is learned too. Where a template rewrites
what an assistant said, so that even the closing mark does not come through, growing prefixes are compared instead.

Marks are Unicode noncharacters; they are removed from what users wrote. Tokens with a meaning are hidden in every text,
so that it can forge neither a learned span nor a picture; plain tags such as <think> are kept in what the assistant and
the system say, since models speak with them, and hidden in what users and tools say.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from mindvl_data.errors import BadSample
from mindvl_data.types import Coordinates, Image, Message, Part, Text, Video

IMAGE_MARK = "\ufdd0"  # one picture
VIDEO_MARK = "\ufdd4"  # one video
SPLIT_MARK = "\ufdd1"  # inside a special token that a user typed; dropped when encoded, as plain text
_START_MARK = "\ufdd2"
_END_MARK = "\ufdd3"
_MARKS = re.compile("[\ufdd0-\ufddf]")
_BORDERS = re.compile(f"[{_START_MARK}{_END_MARK}]")
_TRUSTED = ("assistant", "system")

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
    special_tokens: re.Pattern[str]  # any token with a meaning
    marks: re.Pattern[str]  # the same without plain tags such as <think>
    start_token: str = ""  # begins a sample without a template
    end_token: str  # ends one

    def chat_pieces(self, messages: Sequence[Message], scales: Sequence[Scale]) -> list[Piece]:
        """A conversation; learned are the assistant's contents, each with the token that ends it.

        Raises:
            BadSample: The template refuses the conversation, or changes it so that no learned span can be found.
        """
        plain = [
            {"role": m.role, "content": self._flatten(m.parts, scales, trusted=m.role in _TRUSTED)} for m in messages
        ]
        marked = [m | {"content": _marked(m["content"])} if m["role"] == "assistant" else m for m in plain]
        full = self._render(plain)
        answers = [m["content"] for m in plain if m["role"] == "assistant"]
        spans = self._marked_spans(full, self._render(marked), answers)
        return self._cut(full, self._compare_prefixes(plain, full) if spans is None else spans)

    def content_pieces(self, content: Sequence[Part], scales: Sequence[Scale]) -> list[Piece]:
        """Text and pictures without a template: all of it is learned (pictures never are), then the end token."""
        pieces = [Piece(self._flatten(content, scales, trusted=False), True), Piece(self.end_token, True)]
        return [Piece(self.start_token, False), *pieces] if self.start_token else pieces

    @cached_property
    def _headers(self) -> list[str]:
        """How the template asks for an answer; also without the tag it may open, as answers of the past have it."""
        question = [{"role": "user", "content": "a"}]
        try:
            before, asked = self.render(question, False), self.render(question, True)
        except Exception:  # a template may want more than one message; then its prompt stays unknown
            return []
        header = asked.removeprefix(before) if asked.startswith(before) else ""
        tags = [match for match in self.special_tokens.finditer(header) if not self.marks.fullmatch(match[0])]
        headers = [header, header[: tags[0].start()]] if tags else [header]
        return [text for text in headers if self.marks.search(text)]  # others could stand in what was said

    def _marked_spans(self, full: str, found: str, answers: list[str]) -> list[tuple[int, int]] | None:
        """Where each answer begins and ends in `full`; None where the marks do not tell."""
        if _BORDERS.sub("", found) != full:
            return None
        spans: list[tuple[int, int]] = []
        start: int | None = None
        for number, match in enumerate(_BORDERS.finditer(found)):
            position = match.start() - number
            if match[0] == _START_MARK:
                start = position
                continue
            if len(spans) == len(answers):
                return None
            answer, floor = answers[len(spans)], spans[-1][1] if spans else 0
            begin = self._begin(full, floor, position, start, answer)
            if begin is None:
                return None
            trailing = answer[len(answer.rstrip()) :]
            spans.append((begin, position + (len(trailing) if full.startswith(trailing, position) else 0)))
            start = None
        return spans if len(spans) == len(answers) else None

    def _begin(self, full: str, floor: int, stop: int, start: int | None, answer: str) -> int | None:
        limit = stop if start is None else start
        for header in self._headers:
            place = full.rfind(header, floor, limit)
            if place >= 0:
                return place + len(header)
        if start is None:
            return None
        leading = answer[: len(answer) - len(answer.lstrip())]
        return start - len(leading) if full.endswith(leading, floor, start) else start

    def _flatten(self, parts: Sequence[Part], scales: Sequence[Scale], *, trusted: bool) -> str:
        pieces = []
        for part in parts:
            if isinstance(part, Text):
                pieces.append(_MARKS.sub("\ufffd", part.text))
            elif isinstance(part, Image | Video):
                pieces.append(IMAGE_MARK if isinstance(part, Image) else VIDEO_MARK)
            else:
                pieces.append(coordinates_text(part, scales[part.image]))
        text = "".join(pieces)
        hidden = self.marks if trusted else self.special_tokens
        return hidden.sub(lambda match: match[0][:1] + SPLIT_MARK + match[0][1:], text)

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
            endings = [match for match in self.marks.finditer(turn) if match.end() == len(turn)]
            spans.append((len(before), len(before) + (endings[0].start() if endings else len(turn))))
        return spans

    def _cut(self, text: str, spans: list[tuple[int, int]]) -> list[Piece]:
        pieces, position = [], 0
        for start, stop in spans:
            ending = self.marks.match(text, stop)
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
    """`(x,y)` for a point, `(x1,y1),(x2,y2)` for a box: whole pixels of the resized picture, as Qwen2.5-VL has them."""
    moved = move_coordinates(part, scale)
    return ",".join(f"({x},{y})" for x, y in zip(moved[::2], moved[1::2], strict=True))


def move_coordinates(part: Coordinates, scale: Scale) -> list[int]:
    """The values in whole pixels of the resized picture; those outside the picture are moved to its border."""
    (height, width), (new_height, new_width) = scale
    limits = ((width, new_width), (height, new_height)) * 2
    return [min(max(round(v * new / old), 0), new) for v, (old, new) in zip(part.values, limits, strict=False)]


def _marked(answer: str) -> str:
    """Marks inside the blanks around an answer, so that a template may strip it as it would without them."""
    text = answer.strip()
    start = answer.index(text)
    return f"{answer[:start]}{_START_MARK}{text}{_END_MARK}{answer[start + len(text) :]}"
