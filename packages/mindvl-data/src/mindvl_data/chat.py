# SPDX-License-Identifier: Apache-2.0
"""Sample -> pieces of text, each marked learned or not, by the tokenizer's own Jinja template.

Comes after samples, before tokenization. The template is never taken apart: each assistant content goes through it
between two marks, and the marks are looked for in the result. What is learned begins where the template's own
generation prompt ends and goes up to the token that ends the turn: exactly what the model has to say when it is asked.
So what a template puts between prompt and content (Qwen3's empty thinking) is learned too. Where a template rewrites
what an assistant said, so that even the closing mark does not come through, and where the assistant calls tools, the
messages around it are marked; where that does not tell either, growing prefixes are compared, up to a bound.

Marks are Unicode noncharacters; they are removed from what users wrote. Tokens with a meaning are hidden in every text,
so that it can forge neither a learned span nor an image; plain tags such as <think> are kept in what the assistant and
the system say, since models speak with them, and hidden in what users and tools say.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from mindvl_data.errors import SampleError
from mindvl_data.types import Coordinates, Image, Message, Part, Text, Video

IMAGE_MARK = "\ufdd0"  # one image
VIDEO_MARK = "\ufdd4"  # one video
SPLIT_MARK = "\ufdd1"  # inside a special token that a user typed; dropped when encoded, as plain text
_START_MARK = "\ufdd2"
_END_MARK = "\ufdd3"
_MARKS = re.compile("[\ufdd0-\ufddf]")
_BORDERS = re.compile(f"[{_START_MARK}{_END_MARK}]")
_TRUSTED = ("assistant", "system")
_MOST_COMPARED = 20_000_000  # characters that are rendered to find the answers of one conversation
_RENDER_WORK = 20  # characters that one message of a rendering counts as

Render = Callable[..., str]  # (messages, add_generation_prompt, tools) -> text
Scale = tuple[tuple[int, int], tuple[int, int]]  # (height, width) of an original, and of the same image resized


@dataclass(frozen=True)
class Piece:
    text: str
    learned: bool


@dataclass(frozen=True)
class _Talk:
    """A conversation as a template sees it."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A template and what is needed to read its output."""

    render: Render
    source: str = ""  # Jinja; names of fields are looked for in it
    special_tokens: re.Pattern[str]  # any token with a meaning
    marks: re.Pattern[str]  # the same without plain tags such as <think>
    start_token: str = ""  # begins a sample without a template
    end_token: str  # ends one

    def chat_pieces(
        self, messages: Sequence[Message], scales: Sequence[Scale], tools: Sequence[dict[str, Any]] = ()
    ) -> list[Piece]:
        """A conversation; learned are the assistant's contents, each with the token that ends it.

        Args:
            tools: Descriptions of functions, which the template shows.

        Raises:
            SampleError: The template refuses the conversation, changes it so that no learned span can be found, or does
                not know a field that the conversation uses.
        """
        self._check_fields(messages, tools)
        talk = _Talk([self._plain(message, scales) for message in messages], [self._hidden(tool) for tool in tools])
        full = self._render(talk)
        spans = None
        if not any(message.tool_calls for message in messages):  # calls are learned too, and stand behind the content
            marked = [m | {"content": _marked(m["content"])} if m["role"] == "assistant" else m for m in talk.messages]
            answers = [m["content"] for m in talk.messages if m["role"] == "assistant"]
            spans = self._marked_spans(full, self._render(replace(talk, messages=marked)), answers)
        if spans is None:
            spans = self._spans_between(talk, full)
        return self._cut(full, self._compare_prefixes(talk, full) if spans is None else spans)

    def content_pieces(self, content: Sequence[Part], scales: Sequence[Scale]) -> list[Piece]:
        """Text and images without a template: all of it is learned (images never are), then the end token."""
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
        return hidden.sub(_split, text)

    def _plain(self, message: Message, scales: Sequence[Scale]) -> dict[str, Any]:
        plain: dict[str, Any] = {
            "role": message.role,
            "content": self._flatten(message.parts, scales, trusted=message.role in _TRUSTED),
        }
        if message.reasoning:
            plain["reasoning_content"] = self._hidden(message.reasoning)
        if message.tool_calls:
            plain["tool_calls"] = [self._hidden(call) for call in message.tool_calls]
        return plain

    def _hidden(self, value: Any) -> Any:
        """A JSON value in whose texts no token has a meaning."""
        if isinstance(value, str):
            return self.marks.sub(_split, _MARKS.sub("\ufffd", value))
        if isinstance(value, dict):
            return {self._hidden(name): self._hidden(inner) for name, inner in value.items()}
        return [self._hidden(inner) for inner in value] if isinstance(value, list) else value

    def _check_fields(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> None:
        """A template that does not know a field would leave it out silently."""
        used = {
            "tools": bool(tools),
            "tool_calls": any(message.tool_calls for message in messages),
            "reasoning_content|thinking": any(message.reasoning for message in messages),
        }
        for names, is_used in used.items():
            if is_used and not re.search(rf"\b({names})\b", self.source):
                raise SampleError(f"chat template does not show `{names.split('|')[0]}`, which the record has")

    def _render(self, talk: "_Talk", generation_prompt: bool = False) -> str:
        try:
            return self.render(talk.messages, generation_prompt, talk.tools)
        except Exception as error:  # a template is a foreign program; whatever it raises means it refuses the sample
            raise SampleError(f"chat template refuses the conversation: {error}") from error

    def _spans_between(self, talk: "_Talk", full: str) -> list[tuple[int, int]] | None:
        """Where each answer begins and ends, from what stands around it: the messages before and after are marked.

        It renders the conversation once more, however many turns it has. None where the marks do not tell.
        """
        others = [number for number, message in enumerate(talk.messages) if message["role"] != "assistant"]
        if any(not talk.messages[number]["content"].strip() for number in others):
            return None
        marked = [m | {"content": _marked(m["content"])} if m["role"] != "assistant" else m for m in talk.messages]
        found = self._render(replace(talk, messages=marked))
        borders = [(match[0], match.start() - count) for count, match in enumerate(_BORDERS.finditer(found))]
        if _BORDERS.sub("", found) != full or [mark for mark, _ in borders] != [_START_MARK, _END_MARK] * len(others):
            return None
        places = [place for _, place in borders]
        bounds = dict(zip(others, zip(places[::2], places[1::2], strict=True), strict=True))
        spans = []
        for number, message in enumerate(talk.messages):
            if message["role"] != "assistant":
                continue
            is_last = number == len(talk.messages) - 1
            if (number and number - 1 not in bounds) or not (is_last or number + 1 in bounds):
                return None  # two consecutive answers: nothing stands between them
            floor = bounds[number - 1][1] if number else 0
            stop = len(full) if is_last else self._turn_end(full, bounds[number + 1][0], talk.messages[number + 1])
            begins = [full.find(header, floor, max(stop, 0)) + len(header) for header in self._headers]
            begins = [begin for begin, header in zip(begins, self._headers, strict=True) if begin >= len(header)]
            if not begins or stop < floor:
                return None
            spans.append((begins[0], self._end_of_turn(full, begins[0], stop)))
        return spans

    def _turn_end(self, full: str, start: int, message: dict[str, Any]) -> int:
        """Where the turn before a message ends, whose content starts at `start`; -1 where it cannot be told."""
        opening = self._opening(message["role"])
        leading = len(message["content"]) - len(message["content"].lstrip())
        for content_start in {start, start - leading}:
            if opening and full.endswith(opening, 0, content_start):
                return content_start - len(opening)
        return -1

    def _opening(self, role: str) -> str:
        """What the template puts between an answer's turn and the content of a message that follows it."""
        if role not in self._openings:
            talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
            try:
                before = self.render(talk, False)
                after = self.render([*talk, {"role": role, "content": f"{_START_MARK}c{_END_MARK}"}], False)
            except Exception:  # a template may want other messages around; then what it puts there stays unknown
                before, after = "", ""
            after = after.partition(_START_MARK)[0]
            self._openings[role] = after.removeprefix(before) if before and after.startswith(before) else ""
        return self._openings[role]

    @cached_property
    def _openings(self) -> dict[str, str]:
        return {}

    def _end_of_turn(self, full: str, begin: int, stop: int) -> int:
        """Where the token that ends the turn begins, or the turn ends."""
        turn = full[begin:stop].rstrip()
        endings = [match for match in self.marks.finditer(turn) if match.end() == len(turn)]
        return begin + (endings[0].start() if endings else len(turn))

    def _compare_prefixes(self, talk: "_Talk", full: str) -> list[tuple[int, int]]:
        """The last resort, in quadratic time: the conversation is rendered up to each answer."""
        spans, rendered = [], 0
        for number, message in enumerate(talk.messages):
            if message["role"] != "assistant":
                continue
            before = self._render(replace(talk, messages=talk.messages[:number]), True)
            is_last = number == len(talk.messages) - 1
            after = full if is_last else self._render(replace(talk, messages=talk.messages[: number + 1]))
            if not full.startswith(before) or not full.startswith(after) or len(before) >= len(after):
                raise SampleError(
                    f"chat template rewrites message {number} of the assistant, so what is learned cannot be told apart"
                )
            rendered += len(before) + len(after) + _RENDER_WORK * number
            if rendered > _MOST_COMPARED:
                raise SampleError(
                    f"chat template rewrites what the assistant says, and a conversation of {len(talk.messages)} "
                    "messages is too long to compare turn by turn"
                )
            spans.append((len(before), self._end_of_turn(full, len(before), len(after))))
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
    """`(x,y)` for a point, `(x1,y1),(x2,y2)` for a box: whole pixels of the resized image, as Qwen2.5-VL has them."""
    moved = move_coordinates(part, scale)
    return ",".join(f"({x},{y})" for x, y in zip(moved[::2], moved[1::2], strict=True))


def move_coordinates(part: Coordinates, scale: Scale) -> list[int]:
    """The values in whole pixels of the resized image; those outside the image are moved to its border."""
    (height, width), (new_height, new_width) = scale
    limits = ((width, new_width), (height, new_height)) * 2
    return [min(max(round(v * new / old), 0), new) for v, (old, new) in zip(part.values, limits, strict=False)]


def _split(match: re.Match[str]) -> str:
    """A token with a meaning, made plain text."""
    return match[0][:1] + SPLIT_MARK + match[0][1:]


def _marked(answer: str) -> str:
    """Marks inside the blanks around an answer, so that a template may strip it as it would without them."""
    text = answer.strip()
    start = answer.index(text)
    return f"{answer[:start]}{_START_MARK}{text}{_END_MARK}{answer[start + len(text) :]}"
