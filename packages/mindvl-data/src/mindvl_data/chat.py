# SPDX-License-Identifier: Apache-2.0
"""Sample -> pieces of text, each with or without loss, rendered by the tokenizer's own Jinja template.

Comes after samples, before tokenization. The template is not parsed: each assistant content is rendered between two
markers, and the markers are located in the result. A loss span begins where the template's generation prompt ends and
includes the token that ends the turn: exactly the text that the model generates at inference. Text that a template
inserts between prompt and content (the empty thinking block of Qwen3) therefore has loss too. If a template rewrites
assistant contents, so that the end marker is lost, or if the assistant calls tools, the messages before and after are
marked instead; if that fails too, prefixes of increasing length are compared, up to a limit.

Markers are Unicode noncharacters, which are replaced in the texts of a sample. Special tokens are escaped in every
text, so that a text can forge neither a loss span nor an image; plain tags such as <think> are kept in assistant and
system messages, since models generate them, and escaped in user and tool messages.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from mindvl_data.errors import SampleError
from mindvl_data.types import Coordinates, Image, Message, Part, Text, Video

IMAGE_MARKER = "\ufdd0"  # one image
VIDEO_MARKER = "\ufdd4"  # one video
SPLIT_MARKER = "\ufdd1"  # inside an escaped special token; removed when it is encoded as plain text
_START_MARKER = "\ufdd2"
_END_MARKER = "\ufdd3"
_MARKERS = re.compile("[\ufdd0-\ufddf]")
_BORDERS = re.compile(f"[{_START_MARKER}{_END_MARKER}]")
_TRUSTED = ("assistant", "system")
_MAX_RENDERED = 20_000_000  # characters rendered to find the assistant contents of one conversation
_RENDER_WORK = 20  # cost of one message of a rendering, in characters

Render = Callable[..., str]  # (messages, add_generation_prompt, tools) -> text
Scale = tuple[tuple[int, int], tuple[int, int]]  # (height, width) of an original, and of the same image resized


@dataclass(frozen=True)
class Piece:
    text: str
    in_loss: bool


@dataclass(frozen=True)
class _Conversation:
    """The variables of a chat template."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A chat template, and the tokens that occur in its output."""

    render: Render
    source: str = ""  # Jinja; searched for the names of optional fields
    special_tokens: re.Pattern[str]  # any special token
    control_tokens: re.Pattern[str]  # special tokens other than plain tags such as <think>
    start_token: str = ""  # prepended to a sample without a template
    end_token: str  # appended to a sample without a template

    def chat_pieces(
        self, messages: Sequence[Message], scales: Sequence[Scale], tools: Sequence[dict[str, Any]] = ()
    ) -> list[Piece]:
        """Render a conversation; assistant contents and the tokens that end their turns have loss.

        Args:
            scales: Original size of each image, and its size in the unit of coordinates in texts.
            tools: Function descriptions, rendered by the template.

        Raises:
            SampleError: The template raises an error, rewrites the conversation so that no loss span can be found, or
                does not use a field that the conversation has.
        """
        self._check_fields(messages, tools)
        conversation = _Conversation(
            [self._plain(message, scales) for message in messages], [self._escaped(tool) for tool in tools]
        )
        full = self._render(conversation)
        spans = None
        if not any(message.tool_calls for message in messages):  # calls follow the content and have loss too
            marked = [_with_markers(m) if m["role"] == "assistant" else m for m in conversation.messages]
            answers = [m["content"] for m in conversation.messages if m["role"] == "assistant"]
            spans = self._marked_spans(full, self._render(replace(conversation, messages=marked)), answers)
        if spans is None:
            spans = self._spans_between(conversation, full)
        return self._cut(full, self._compare_prefixes(conversation, full) if spans is None else spans)

    def content_pieces(self, content: Sequence[Part], scales: Sequence[Scale]) -> list[Piece]:
        """Render text and images without a template: every text token has loss, then the end token."""
        pieces = [Piece(self._flatten(content, scales, trusted=False), True), Piece(self.end_token, True)]
        return [Piece(self.start_token, False), *pieces] if self.start_token else pieces

    @cached_property
    def _headers(self) -> list[str]:
        """The generation prompt of the template, also without a tag at its end, which earlier answers may lack."""
        question = [{"role": "user", "content": "a"}]
        try:
            before, asked = self.render(question, False), self.render(question, True)
        except Exception:  # the template may need more messages; then its generation prompt is unknown
            return []
        header = asked.removeprefix(before) if asked.startswith(before) else ""
        tags = [match for match in self.special_tokens.finditer(header) if not self.control_tokens.fullmatch(match[0])]
        headers = [header, header[: tags[0].start()]] if tags else [header]
        return [text for text in headers if self.control_tokens.search(text)]  # others may occur in a content

    def _marked_spans(self, full: str, found: str, answers: list[str]) -> list[tuple[int, int]] | None:
        """Start and end of each loss span in `full`, or None if they cannot be derived from the markers."""
        if _BORDERS.sub("", found) != full:
            return None
        spans: list[tuple[int, int]] = []
        start: int | None = None
        for number, match in enumerate(_BORDERS.finditer(found)):
            position = match.start() - number
            if match[0] == _START_MARKER:
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
            position = full.rfind(header, floor, limit)
            if position >= 0:
                return position + len(header)
        if start is None:
            return None
        leading = answer[: len(answer) - len(answer.lstrip())]
        return start - len(leading) if full.endswith(leading, floor, start) else start

    def _flatten(self, parts: Sequence[Part], scales: Sequence[Scale], *, trusted: bool) -> str:
        pieces = []
        for part in parts:
            if isinstance(part, Text):
                pieces.append(_MARKERS.sub("\ufffd", part.text))
            elif isinstance(part, Image | Video):
                pieces.append(IMAGE_MARKER if isinstance(part, Image) else VIDEO_MARKER)
            else:
                pieces.append(coordinates_text(part, scales[part.image]))
        text = "".join(pieces)
        escaped = self.control_tokens if trusted else self.special_tokens
        return escaped.sub(_split, text)

    def _plain(self, message: Message, scales: Sequence[Scale]) -> dict[str, Any]:
        plain: dict[str, Any] = {
            "role": message.role,
            "content": self._flatten(message.parts, scales, trusted=message.role in _TRUSTED),
        }
        if message.reasoning:
            plain["reasoning_content"] = self._escaped(message.reasoning)
        if message.tool_calls:
            plain["tool_calls"] = [self._escaped(call) for call in message.tool_calls]
        return plain

    def _escaped(self, value: Any) -> Any:
        """A JSON value with the control tokens in its texts escaped."""
        if isinstance(value, str):
            return self.control_tokens.sub(_split, _MARKERS.sub("\ufffd", value))
        if isinstance(value, dict):
            return {self._escaped(name): self._escaped(inner) for name, inner in value.items()}
        return [self._escaped(inner) for inner in value] if isinstance(value, list) else value

    def _check_fields(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> None:
        """Refuse fields that the template does not use: it would omit them silently."""
        used = {
            "tools": bool(tools),
            "tool_calls": any(message.tool_calls for message in messages),
            "reasoning_content|thinking": any(message.reasoning for message in messages),
        }
        for names, is_used in used.items():
            if is_used and not re.search(rf"\b({names})\b", self.source):
                raise SampleError(f"chat template does not use `{names.split('|')[0]}`, which the record has")

    def _render(self, conversation: _Conversation, generation_prompt: bool = False) -> str:
        try:
            return self.render(conversation.messages, generation_prompt, conversation.tools)
        except Exception as error:  # a template can raise any exception to refuse a conversation
            raise SampleError(f"chat template raised an error: {error}") from error

    def _spans_between(self, conversation: _Conversation, full: str) -> list[tuple[int, int]] | None:
        """Start and end of each loss span, from markers around the other messages.

        Renders the conversation once, whatever its number of turns. None if the markers do not determine the spans.
        """
        messages = conversation.messages
        others = [number for number, message in enumerate(messages) if message["role"] != "assistant"]
        if any(not messages[number]["content"].strip() for number in others):
            return None
        marked = [_with_markers(m) if m["role"] != "assistant" else m for m in messages]
        found = self._render(replace(conversation, messages=marked))
        borders = [(match[0], match.start() - count) for count, match in enumerate(_BORDERS.finditer(found))]
        if _BORDERS.sub("", found) != full or [marker for marker, _ in borders] != [_START_MARKER, _END_MARKER] * len(
            others
        ):
            return None
        positions = [position for _, position in borders]
        bounds = dict(zip(others, zip(positions[::2], positions[1::2], strict=True), strict=True))
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            is_last = number == len(messages) - 1
            if (number and number - 1 not in bounds) or not (is_last or number + 1 in bounds):
                return None  # two consecutive assistant messages: no marker between them
            floor = bounds[number - 1][1] if number else 0
            stop = len(full) if is_last else self._turn_end(full, bounds[number + 1][0], messages[number + 1])
            begins = [full.find(header, floor, max(stop, 0)) + len(header) for header in self._headers]
            begins = [begin for begin, header in zip(begins, self._headers, strict=True) if begin >= len(header)]
            if not begins or stop < floor:
                return None
            spans.append((begins[0], self._end_of_turn(full, begins[0], stop)))
        return spans

    def _turn_end(self, full: str, start: int, message: dict[str, Any]) -> int:
        """End of the turn before a message whose content starts at `start`; -1 if unknown."""
        opening = self._opening(message["role"])
        leading = len(message["content"]) - len(message["content"].lstrip())
        for content_start in {start, start - leading}:
            if opening and full.endswith(opening, 0, content_start):
                return content_start - len(opening)
        return -1

    def _opening(self, role: str) -> str:
        """The text between the end of an assistant turn and the content of the next message."""
        if role not in self._openings:
            turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
            try:
                before = self.render(turn, False)
                after = self.render([*turn, {"role": role, "content": f"{_START_MARKER}c{_END_MARKER}"}], False)
            except Exception:  # the template may need other messages; then the text is unknown
                before, after = "", ""
            after = after.partition(_START_MARKER)[0]
            self._openings[role] = after.removeprefix(before) if before and after.startswith(before) else ""
        return self._openings[role]

    @cached_property
    def _openings(self) -> dict[str, str]:
        return {}

    def _end_of_turn(self, full: str, begin: int, stop: int) -> int:
        """Start of the token that ends the turn; without one, end of the turn."""
        turn = full[begin:stop].rstrip()
        endings = [match for match in self.control_tokens.finditer(turn) if match.end() == len(turn)]
        return begin + (endings[0].start() if endings else len(turn))

    def _compare_prefixes(self, conversation: _Conversation, full: str) -> list[tuple[int, int]]:
        """Find the loss spans in quadratic time, by rendering the conversation up to each assistant message."""
        messages = conversation.messages
        spans, rendered = [], 0
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(replace(conversation, messages=messages[:number]), True)
            is_last = number == len(messages) - 1
            after = full if is_last else self._render(replace(conversation, messages=messages[: number + 1]))
            if not full.startswith(before) or not full.startswith(after) or len(before) >= len(after):
                raise SampleError(
                    f"chat template rewrites message {number} of the assistant, so its loss span cannot be determined"
                )
            rendered += len(before) + len(after) + _RENDER_WORK * number
            if rendered > _MAX_RENDERED:
                raise SampleError(
                    f"chat template rewrites assistant messages, and a conversation of {len(messages)} messages is too "
                    "long to compare turn by turn"
                )
            spans.append((len(before), self._end_of_turn(full, len(before), len(after))))
        return spans

    def _cut(self, text: str, spans: list[tuple[int, int]]) -> list[Piece]:
        pieces, position = [], 0
        for start, stop in spans:
            ending = self.control_tokens.match(text, stop)
            if ending is None:  # some templates insert a space before the end token
                spaced = re.compile(r"\s*" + re.escape(self.end_token)).match(text, stop)
                stop = spaced.end() if spaced else stop
            else:
                stop = ending.end()
            pieces += [Piece(text[position:start], False), Piece(text[start:stop], True)]
            position = stop
        pieces.append(Piece(text[position:], False))
        return [piece for piece in pieces if piece.text]


def coordinates_text(part: Coordinates, scale: Scale) -> str:
    """`(x,y)` for a point, `(x1,y1),(x2,y2)` for a box, in whole units of the second size of the scale."""
    moved = move_coordinates(part, scale)
    return ",".join(f"({x},{y})" for x, y in zip(moved[::2], moved[1::2], strict=True))


def move_coordinates(part: Coordinates, scale: Scale) -> list[int]:
    """Coordinates in whole units of the second size of the scale, clamped to the image."""
    (height, width), (new_height, new_width) = scale
    limits = ((width, new_width), (height, new_height)) * 2
    return [min(max(round(v * new / old), 0), new) for v, (old, new) in zip(part.values, limits, strict=False)]


def _split(match: re.Match[str]) -> str:
    """Escape a special token, so that it is encoded as plain text."""
    return match[0][:1] + SPLIT_MARKER + match[0][1:]


def _with_markers(message: dict[str, Any]) -> dict[str, Any]:
    """The message with markers inside the whitespace around its content, which a template may strip."""
    content = message["content"]
    text = content.strip()
    start = content.index(text)
    return message | {"content": f"{content[:start]}{_START_MARKER}{text}{_END_MARKER}{content[start + len(text) :]}"}
