# SPDX-License-Identifier: Apache-2.0
"""Sample -> token ids with a learned/not mask; the only file that knows transformers' tokenizers.

Comes after chat, before collate; the index uses it too, to measure lengths. Text is encoded piece by piece, cut
where the learned spans begin and end: this is how a model meets its prompt when it generates.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tokenizers
from numpy.typing import NDArray

from mindvl_data.chat import IMAGE_MARK, SPLIT_MARK, VIDEO_MARK, ChatTemplate, Piece, Render, Scale
from mindvl_data.errors import DataError, SampleError
from mindvl_data.templates import compile_template
from mindvl_data.types import IGNORE_INDEX, Sample

_MEDIA = re.compile(f"([{IMAGE_MARK}{VIDEO_MARK}])")
# Tokens that look like marks; others, such as runs of spaces, are ordinary vocabulary that was added late.
_MARKUP = re.compile(r"[<\[].*[>\]]", re.DOTALL)
_TAG = re.compile(r"</?\w+>", re.ASCII)
_SHORT = 64  # characters; what templates put between contents comes again and again
_VERSION = 3  # part of the identity: lengths measured by other rules are not mixed with ours


class Encoded(Protocol):
    """Ids with placeholders, and what is learned of them."""

    @property
    def ids(self) -> NDArray[np.int64]: ...

    @property
    def learned(self) -> NDArray[np.bool_]: ...


@dataclass(frozen=True)
class EncodedText:
    """Tokens of a sample with exactly one placeholder per image or video, not yet repeated."""

    ids: NDArray[np.int64]  # [S]
    learned: NDArray[np.bool_]  # [S]


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A transformers tokenizer, its template, and the ids this package needs."""

    hf: Any  # the transformers object, for saving and decoding
    template: ChatTemplate
    backend: tokenizers.Tokenizer  # private copy that never reads a token with a meaning out of text
    pad_id: int
    end_id: int
    vision_start_id: int
    image_pad_id: int
    vision_end_id: int
    video_pad_id: int | None  # None: the tokenizer cannot show videos
    identity: str  # hash of vocabulary, merges and template
    special_ids: dict[str, int] = field(repr=False)  # tokens with a meaning, by their text
    known: Callable[[str], Sequence[int]] = field(repr=False)  # encodes short texts, and remembers them

    @property
    def media_pad_ids(self) -> tuple[int, ...]:
        """Placeholders of images and videos."""
        return (self.image_pad_id,) if self.video_pad_id is None else (self.image_pad_id, self.video_pad_id)

    def encode(self, sample: Sample, scales: Sequence[Scale]) -> EncodedText:
        """Tokens and what is learned of them.

        Args:
            scales: Original and resized size of each image; used where the text holds coordinates.

        Raises:
            SampleError: The template refuses the sample.
            DataError: The sample holds a video, and the tokenizer has no token for one.
        """
        if sample.num_videos and self.video_pad_id is None:
            raise DataError(
                "tokenizer lacks <|video_pad|>, and a sample holds a video. data.tokenizer. Add the token, or leave "
                "sources with videos out."
            )
        if sample.messages:
            pieces = self.template.chat_pieces(sample.messages, scales, sample.tools)
        else:
            pieces = self.template.content_pieces(sample.content, scales)
        ids: list[int] = []
        learned: list[bool] = []
        for piece in pieces:
            self._encode_piece(piece, ids, learned)
        encoded = EncodedText(np.array(ids, np.int64), np.array(learned, np.bool_))
        for what, pad_id, wanted in (
            ("images", self.image_pad_id, sample.num_images),
            ("videos", self.video_pad_id, sample.num_videos),
        ):
            shown = int((encoded.ids == pad_id).sum()) if pad_id is not None else 0
            if shown != wanted:
                raise SampleError(f"chat template shows {shown} of {wanted} {what}")
        return encoded

    def _encode_piece(self, piece: Piece, ids: list[int], learned: list[bool]) -> None:
        for text in self.template.special_tokens.split(piece.text):
            if not text:
                continue
            special = self.special_ids.get(text)
            if special is not None:
                ids.append(special)
                learned.append(piece.learned)
                continue
            for run in _MEDIA.split(text):
                if run in (IMAGE_MARK, VIDEO_MARK):
                    pad_id = self.image_pad_id if run == IMAGE_MARK else self.video_pad_id
                    assert pad_id is not None
                    ids += [self.vision_start_id, pad_id, self.vision_end_id]
                    learned += [False] * 3
                elif run:
                    tokens = self._encode_run(run)
                    ids += tokens
                    learned += [piece.learned] * len(tokens)

    def _encode_run(self, run: str) -> Sequence[int]:
        text = run.replace(SPLIT_MARK, "")
        return self.known(text) if len(text) <= _SHORT else self.backend.encode(text, add_special_tokens=False).ids


def load_tokenizer(directory: Path | str) -> Tokenizer:
    """Read a tokenizer directory as transformers saves it; nothing is fetched.

    Raises:
        DataError: The directory has no fast tokenizer, no chat template, or lacks a token that images need.
    """
    from transformers import AutoTokenizer  # here: the import takes a second, and the data_order does not need it

    if not Path(directory).is_dir():
        raise DataError(f"tokenizer directory {directory} does not exist. Name a directory that holds tokenizer.json.")
    try:
        # False: a model directory may carry code of its own, which its tokenizer does not need; None would ask the user.
        hf = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # damaged files raise many kinds, tokenizers' own plain Exception among them
        lines = str(error).splitlines() or [type(error).__name__]
        why = lines[0].rstrip(".")[:200]  # transformers lists what else might be installed
        raise DataError(f"tokenizer cannot be read: {why}. {directory}. Save it with transformers.") from error
    backend = getattr(hf, "backend_tokenizer", None)
    if backend is None or not hf.chat_template:
        missing = "fast tokenizer (tokenizer.json)" if backend is None else "chat template"
        raise DataError(f"no {missing}. {directory}. Save the tokenizer with transformers, template included.")
    return wrap_tokenizer(hf, where=str(directory))


def wrap_tokenizer(hf: Any, *, where: str = "tokenizer") -> Tokenizer:
    """The same for a transformers tokenizer that is already in memory."""
    serialized: str = hf.backend_tokenizer.to_str()
    backend, special_ids, tags = _plain_backend(serialized)
    needed = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
    lacking = [token for token in needed if token not in special_ids]
    if lacking or hf.eos_token is None or hf.pad_token_id is None:
        what = f"special tokens {lacking}" if lacking else "an eos or a pad token"
        raise DataError(f"tokenizer lacks {what}. {where}. Add them and save the tokenizer again.")

    render, template_source = _renderer(hf, where)
    first = hf("a")["input_ids"][:1]
    starts_with_bos = hf.bos_token is not None and first == [hf.bos_token_id]
    digest = hashlib.sha256(f"{_VERSION}\0{serialized}\0{hf.chat_template}\0{starts_with_bos}".encode())
    template = ChatTemplate(
        render=render,
        source=template_source,
        special_tokens=_any_of(special_ids),
        marks=_any_of([token for token in special_ids if token not in tags]),
        start_token=hf.bos_token if starts_with_bos else "",
        end_token=hf.eos_token,
    )
    return Tokenizer(
        hf=hf,
        template=template,
        backend=backend,
        pad_id=hf.pad_token_id,
        end_id=hf.eos_token_id,
        vision_start_id=special_ids["<|vision_start|>"],
        image_pad_id=special_ids["<|image_pad|>"],
        vision_end_id=special_ids["<|vision_end|>"],
        video_pad_id=special_ids.get("<|video_pad|>"),
        identity=digest.hexdigest(),
        special_ids=special_ids,
        known=lru_cache(4096)(lambda text: tuple(backend.encode(text, add_special_tokens=False).ids)),
    )


def _renderer(hf: Any, where: str) -> tuple[Render, str]:
    """The tokenizer's chat template as a function, as `apply_chat_template` calls it, and its source."""
    tokens = dict(hf.special_tokens_map)
    try:
        sources = {tools: hf.get_chat_template(None, tools=[{}] if tools else None) for tools in (False, True)}
    except ValueError as error:  # several templates, and none of them is the default
        names = sorted(hf.chat_template)
        raise DataError(
            f"{where}: has the chat templates {names}, and none of them is `default`. Name the one to use `default`."
        ) from error
    if not all(isinstance(source, str) for source in sources.values()):
        raise DataError(f"{where}: its chat template is {str(hf.chat_template)[:40]!r} and no text. Correct it.")
    compiled = {source: compile_template(source) for source in set(sources.values())}

    def render(messages: list[dict[str, Any]], generation_prompt: bool, tools: Sequence[dict[str, Any]] = ()) -> str:
        return compiled[sources[bool(tools)]](
            messages=[_with_thinking(message) for message in messages],
            tools=list(tools) or None,
            documents=None,
            add_generation_prompt=generation_prompt,
            **tokens,
        )

    return render, "\n".join(compiled)


def _with_thinking(message: dict[str, Any]) -> dict[str, Any]:
    """Some templates know `reasoning_content` as `thinking`; transformers gives both."""
    reasoning = message.get("reasoning_content")
    return message if reasoning is None else {"thinking": reasoning, **message}


def _plain_backend(serialized: str) -> tuple[tokenizers.Tokenizer, dict[str, int], list[str]]:
    """A backend that reads no token with a meaning out of text; the ids of those tokens; and which are plain tags.

    Some tokenizers flag the marks between turns as ordinary added tokens (DeepSeek's User and Assistant), so the flag
    alone does not tell what could forge a turn; whatever looks like a mark counts as one.
    """
    document = json.loads(serialized)
    special_ids, tags = {}, []
    for token in document["added_tokens"]:
        if token["special"] or _MARKUP.fullmatch(token["content"]):
            special_ids[token["content"]] = token["id"]
            if not token["special"] and _TAG.fullmatch(token["content"]):
                tags.append(token["content"])
            token["special"] = True
    backend = tokenizers.Tokenizer.from_str(json.dumps(document))
    backend.encode_special_tokens = True
    backend.no_truncation()
    backend.no_padding()
    return backend, special_ids, tags


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Matches any of the tokens, the longest first; nothing when there are none."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")" if longest_first else "((?!))")


def expand(encoded: Encoded, tokens_per_medium: Sequence[int], pad_ids: Sequence[int]) -> tuple[Any, Any]:
    """Repeat each placeholder and shift the labels.

    Args:
        tokens_per_medium: For each image and video, in the order of the text.
        pad_ids: The tokens that are placeholders.

    Returns:
        input_ids and labels, both int64 [S]; `labels[i]` is the token after `input_ids[i]` where that is learned.
    """
    repeats = np.ones(len(encoded.ids), np.int64)
    is_pad = np.zeros(len(encoded.ids), np.bool_)
    for pad_id in pad_ids:
        is_pad |= encoded.ids == pad_id
    repeats[is_pad] = tokens_per_medium
    input_ids = np.repeat(encoded.ids, repeats)
    learned = np.repeat(encoded.learned, repeats)
    labels = np.full(len(input_ids), IGNORE_INDEX, np.int64)
    np.copyto(labels[:-1], input_ids[1:], where=learned[1:])
    return input_ids, labels
