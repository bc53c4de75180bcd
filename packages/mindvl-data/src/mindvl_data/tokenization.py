# SPDX-License-Identifier: Apache-2.0
"""Sample -> token ids and loss mask.

Comes after chat and tokenizer_directory, before collate; the index uses it too, to measure lengths. Text is encoded
piece by piece, split at the ends of the loss spans, so that a prompt has the same tokens as at inference.
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

from mindvl_data.chat import IMAGE_MARKER, SPLIT_MARKER, VIDEO_MARKER, ChatTemplate, Piece, Render, Scale
from mindvl_data.errors import DataError, SampleError
from mindvl_data.templates import compile_template
from mindvl_data.tokenizer_directory import TokenizerParts, parts_of, read_parts
from mindvl_data.types import IGNORE_INDEX, Sample

_MEDIA = re.compile(f"([{IMAGE_MARKER}{VIDEO_MARKER}])")
# Added tokens that look like markup; others, such as runs of spaces, are ordinary vocabulary.
_MARKUP = re.compile(r"[<\[].*[>\]]", re.DOTALL)
_TAG = re.compile(r"</?\w+>", re.ASCII)
_SHORT = 64  # characters; texts up to this length are cached, since templates repeat them
_VERSION = 3  # part of the identity, so that lengths measured by other rules are not used


class Encoded(Protocol):
    """Token ids with one placeholder per image or video, and their loss mask."""

    @property
    def ids(self) -> NDArray[np.int64]: ...

    @property
    def in_loss(self) -> NDArray[np.bool_]: ...


@dataclass(frozen=True)
class EncodedText:
    """Tokens of a sample with one placeholder per image or video, not yet repeated."""

    ids: NDArray[np.int64]  # [S]
    in_loss: NDArray[np.bool_]  # [S], tokens with loss


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A tokenizer of a transformers directory, its chat template, and the token ids that this package uses."""

    template: ChatTemplate
    chat_template: Any  # Jinja source, or sources by name
    vocab_size: int  # with added tokens
    backend: tokenizers.Tokenizer  # private copy that encodes special tokens in a text as plain text
    pad_id: int
    end_id: int
    vision_start_id: int
    image_pad_id: int
    vision_end_id: int
    video_pad_id: int | None  # None: the tokenizer does not support videos
    identity: str  # hash of vocabulary, merges and template
    special_ids: dict[str, int] = field(repr=False)  # special tokens by their text
    known: Callable[[str], Sequence[int]] = field(repr=False)  # encodes short texts, cached

    @property
    def media_pad_ids(self) -> tuple[int, ...]:
        """Token ids of the placeholders of images and videos."""
        return (self.image_pad_id,) if self.video_pad_id is None else (self.image_pad_id, self.video_pad_id)

    def encode(self, sample: Sample, scales: Sequence[Scale]) -> EncodedText:
        """Render and encode a sample.

        Args:
            scales: Original size of each image, and its size in the unit of coordinates in texts.

        Raises:
            SampleError: The template raises an error, or does not render every image and video once.
            DataError: The sample contains a video, and the tokenizer has no token for videos.
        """
        if sample.num_videos and self.video_pad_id is None:
            raise DataError(
                "data.tokenizer: the tokenizer has no token <|video_pad|>, but a sample contains a video. Add the "
                "token, or remove the sources with videos."
            )
        if sample.messages:
            pieces = self.template.chat_pieces(sample.messages, scales, sample.tools)
        else:
            pieces = self.template.content_pieces(sample.content, scales)
        ids: list[int] = []
        in_loss: list[bool] = []
        for piece in pieces:
            self._encode_piece(piece, ids, in_loss)
        encoded = EncodedText(np.array(ids, np.int64), np.array(in_loss, np.bool_))
        for kind, pad_id, expected in (
            ("images", self.image_pad_id, sample.num_images),
            ("videos", self.video_pad_id, sample.num_videos),
        ):
            found = int((encoded.ids == pad_id).sum()) if pad_id is not None else 0
            if found != expected:
                raise SampleError(f"chat template rendered {found} of {expected} {kind}")
        return encoded

    def with_timestamps(self, encoded: EncodedText, times: Sequence[Sequence[float]]) -> EncodedText:
        """Replace the placeholder of each video by one for each temporal patch, after its time, none of it with loss.

        The text between the tokens around a video is `<0.3 seconds><|vision_start|><|video_pad|><|vision_end|>` for each
        patch, as the processor of Qwen3-VL in transformers 5 writes it.

        Args:
            times: Times in seconds of the temporal patches of each video.
        """
        ids: list[int] = []
        in_loss: list[bool] = []
        videos = iter(times)
        for token, has_loss in zip(encoded.ids.tolist(), encoded.in_loss.tolist(), strict=True):
            if token != self.video_pad_id:
                ids.append(token)
                in_loss.append(has_loss)
                continue
            for seconds in next(videos):
                ids += [*self.known(f"<{seconds:.1f} seconds>"), self.vision_start_id, token, self.vision_end_id]
            in_loss += [False] * (len(ids) - len(in_loss))
        return EncodedText(np.array(ids, np.int64), np.array(in_loss, np.bool_))

    def _encode_piece(self, piece: Piece, ids: list[int], in_loss: list[bool]) -> None:
        for text in self.template.special_tokens.split(piece.text):
            if not text:
                continue
            special = self.special_ids.get(text)
            if special is not None:
                ids.append(special)
                in_loss.append(piece.in_loss)
                continue
            for run in _MEDIA.split(text):
                if run in (IMAGE_MARKER, VIDEO_MARKER):
                    pad_id = self.image_pad_id if run == IMAGE_MARKER else self.video_pad_id
                    assert pad_id is not None
                    ids += [self.vision_start_id, pad_id, self.vision_end_id]
                    in_loss += [False] * 3
                elif run:
                    tokens = self._encode_run(run)
                    ids += tokens
                    in_loss += [piece.in_loss] * len(tokens)

    def _encode_run(self, run: str) -> Sequence[int]:
        text = run.replace(SPLIT_MARKER, "")
        return self.known(text) if len(text) <= _SHORT else self.backend.encode(text, add_special_tokens=False).ids


def load_tokenizer(directory: Path | str) -> Tokenizer:
    """Load a tokenizer from a directory saved by transformers, without network access.

    Raises:
        DataError: The directory has no fast tokenizer, no chat template, or no tokens for images.
    """
    if not Path(directory).is_dir():
        raise DataError(
            f"{directory}: the tokenizer directory does not exist. Use a directory that contains tokenizer.json."
        )
    parts = read_parts(Path(directory)) or _with_transformers(directory)
    if not parts.chat_template:
        raise DataError(
            f"{directory}: the tokenizer has no chat template. Save it with transformers, including its chat template."
        )
    return _tokenizer(parts, where=str(directory))


def _with_transformers(directory: Path | str) -> TokenizerParts:
    from transformers import AutoTokenizer  # here: the import takes a second

    try:
        # False: never executes Python files of the directory. None would ask the user.
        hf = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # damaged files raise many types, including plain Exception of tokenizers
        lines = str(error).splitlines() or [type(error).__name__]
        why = lines[0].rstrip(".")[:200]  # further lines list optional packages
        raise DataError(
            f"{directory}: the tokenizer cannot be read: {why}. Save it again with transformers."
        ) from error
    if getattr(hf, "backend_tokenizer", None) is None:
        raise DataError(
            f"{directory}: the tokenizer has no fast tokenizer (tokenizer.json). Save it again with transformers."
        )
    return parts_of(hf)


def wrap_tokenizer(hf: Any) -> Tokenizer:
    """Wrap a transformers tokenizer that is already loaded.

    Raises:
        DataError: As in load_tokenizer.
    """
    return _tokenizer(parts_of(hf), where="tokenizer")


def _tokenizer(parts: TokenizerParts, where: str) -> Tokenizer:
    serialized = parts.backend.to_str()
    backend, special_ids, tags = _plain_backend(serialized)
    needed = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
    lacking = [token for token in needed if token not in special_ids]
    bos, end, pad = (parts.special_tokens.get(key) for key in ("bos_token", "eos_token", "pad_token"))
    end_id, pad_id = (None if token is None else backend.token_to_id(token) for token in (end, pad))
    if lacking or end is None or end_id is None or pad_id is None:
        missing = f"special tokens {lacking}" if lacking else "eos or pad token"
        raise DataError(f"{where}: the tokenizer has no {missing}. Add what is missing and save the tokenizer again.")

    render, template_source = _renderer(parts, where)
    starts_with_bos = bos is not None and backend.encode("a").ids[:1] == [backend.token_to_id(bos)]
    digest = hashlib.sha256(f"{_VERSION}\0{serialized}\0{parts.chat_template}\0{starts_with_bos}".encode())
    template = ChatTemplate(
        render=render,
        source=template_source,
        special_tokens=_any_of(special_ids),
        control_tokens=_any_of([token for token in special_ids if token not in tags]),
        start_token=bos if bos is not None and starts_with_bos else "",
        end_token=end,
    )
    return Tokenizer(
        template=template,
        chat_template=parts.chat_template,
        vocab_size=parts.backend.get_vocab_size(with_added_tokens=True),
        backend=backend,
        pad_id=pad_id,
        end_id=end_id,
        vision_start_id=special_ids["<|vision_start|>"],
        image_pad_id=special_ids["<|image_pad|>"],
        vision_end_id=special_ids["<|vision_end|>"],
        video_pad_id=special_ids.get("<|video_pad|>"),
        identity=digest.hexdigest(),
        special_ids=special_ids,
        known=lru_cache(4096)(lambda text: tuple(backend.encode(text, add_special_tokens=False).ids)),
    )


def _renderer(parts: TokenizerParts, where: str) -> tuple[Render, str]:
    """The chat template as a function with the variables of `apply_chat_template`, and its source."""
    named = parts.chat_template if isinstance(parts.chat_template, dict) else {"default": parts.chat_template}
    sources: dict[bool, Any] = {False: named.get("default"), True: named.get("tool_use", named.get("default"))}
    if "default" not in named:
        raise DataError(
            f"{where}: the tokenizer has the chat templates {sorted(named)}, but none named `default`. "
            "Rename one to `default`."
        )
    if not all(isinstance(source, str) for source in sources.values()):
        raise DataError(
            f"{where}: the chat template must be a string, got {str(parts.chat_template)[:40]!r}. Correct it."
        )
    compiled = {source: compile_template(source) for source in set(sources.values())}

    def render(messages: list[dict[str, Any]], generation_prompt: bool, tools: Sequence[dict[str, Any]] = ()) -> str:
        return compiled[sources[bool(tools)]](
            messages=[_with_thinking(message) for message in messages],
            tools=list(tools) or None,
            documents=None,
            add_generation_prompt=generation_prompt,
            **parts.special_tokens,
        )

    return render, "\n".join(compiled)


def _with_thinking(message: dict[str, Any]) -> dict[str, Any]:
    """Some templates use the name `thinking` for `reasoning_content`; transformers passes both."""
    reasoning = message.get("reasoning_content")
    return message if reasoning is None else {"thinking": reasoning, **message}


def _plain_backend(serialized: str) -> tuple[tokenizers.Tokenizer, dict[str, int], list[str]]:
    """A backend that encodes special tokens in a text as plain text; their ids; and those that are plain tags.

    Some tokenizers do not flag their turn tokens as special (User and Assistant of DeepSeek), so every added token that
    looks like markup is treated as special.
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
    """A pattern for any of the tokens, longest first; without tokens it matches nothing."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")" if longest_first else "((?!))")


def expand(encoded: Encoded, tokens_per_medium: Sequence[int], pad_ids: Sequence[int]) -> tuple[Any, Any]:
    """Repeat each placeholder and shift the labels.

    Args:
        tokens_per_medium: Number of tokens of each image and video, in the order of the text.
        pad_ids: Token ids of the placeholders.

    Returns:
        input_ids and labels, both int64 [S]; `labels[i]` is `input_ids[i + 1]` where that token has loss.
    """
    repeats = np.ones(len(encoded.ids), np.int64)
    is_pad = np.zeros(len(encoded.ids), np.bool_)
    for pad_id in pad_ids:
        is_pad |= encoded.ids == pad_id
    repeats[is_pad] = tokens_per_medium
    input_ids = np.repeat(encoded.ids, repeats)
    in_loss = np.repeat(encoded.in_loss, repeats)
    labels = np.full(len(input_ids), IGNORE_INDEX, np.int64)
    np.copyto(labels[:-1], input_ids[1:], where=in_loss[1:])
    return input_ids, labels
