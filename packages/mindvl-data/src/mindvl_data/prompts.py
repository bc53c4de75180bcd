# SPDX-License-Identifier: Apache-2.0
"""Prompts for greedy generation: samples without their first answer, and batches whose last token is to be predicted.

A prompt is encoded as a training sample with an answer and cut where the loss begins, which is where the generation
prompt of the chat template ends. So a model sees exactly the tokens that it was trained on. Used by validation.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindvl_data.collate import collate
from mindvl_data.config import DataConfig, SampleRules
from mindvl_data.encode import decode_sample, encode_sample
from mindvl_data.errors import DataError, SampleError
from mindvl_data.images import read_size
from mindvl_data.order.sources import SourceIndex
from mindvl_data.positions import PositionKind
from mindvl_data.tokenization import Tokenizer
from mindvl_data.types import IGNORE_INDEX, Batch, MediaSize, PackedSample, RawSample, SampleReference, TokenizedSample

_KEYS = {"prompt", "images", "expected"}


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt as model inputs."""

    name: str  # file and line, or source, shard and key
    text: str
    expected: str | None  # the answer of the sample, or of the file
    sample: TokenizedSample  # up to the first token of the answer; its labels are not used


def read_prompts(path: Path, *, rules: SampleRules, tokenizer: Tokenizer) -> list[Prompt]:
    """Read a JSON lines file: {"prompt": TEXT, "images": [FILE, ...], "expected": TEXT}, the last two optional.

    Args:
        path: Relative image files start at its directory.

    Raises:
        DataError: A line is not a prompt, or an image cannot be read; the message names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: the file cannot be read ({error}). Check the path.") from error
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            raw, expected = _raw_prompt(line, where, path.parent, rules)
            found.append(replace(_prompt(raw, where, rules, tokenizer), expected=expected))
        except (SampleError, OSError) as error:
            raise DataError(f"{where}: {error}. Correct the line or the file that it names.") from error
    if not found:
        raise DataError(
            f'{path}: has no prompt. Write lines such as {{"prompt": "What is shown?", "images": ["a.png"]}}.'
        )
    return found


def first_prompts(source: SourceIndex, count: int, *, tokenizer: Tokenizer) -> Iterator[Prompt]:
    """The first conversations of a source, at most `count`; samples that cannot be used or decoded are skipped."""
    for shard in range(len(source.index.shards)):
        for row in source.used_rows(shard).tolist():
            if count <= 0:
                return
            raw = source.read(shard, row)
            name = f"{source.name}: {source.index.shards.names[shard]}:{raw.key}"
            try:
                prompt = _prompt(raw, name, source.rules, tokenizer)
            except SampleError:
                continue
            if len(prompt.sample.input_ids):
                count -= 1
                yield prompt


def prompt_batch(
    prompt: Prompt | None,
    answer: Sequence[int],
    *,
    config: DataConfig,
    tokenizer: Tokenizer,
    position_kind: PositionKind,
) -> Batch:
    """A batch of a prompt and the answer so far, in which only the last token has a label; None: a batch of padding."""
    samples: tuple[TokenizedSample, ...] = ()
    references: tuple[SampleReference, ...] = ()
    if prompt is not None:
        ids = np.concatenate((prompt.sample.input_ids, np.array(answer, np.int64)))
        labels = np.full(len(ids), IGNORE_INDEX, np.int64)
        labels[-1] = ids[-1]  # any token: its loss is not used
        samples = (replace(prompt.sample, input_ids=ids, labels=labels),)
        references = (
            SampleReference(
                source=prompt.name, epoch=0, shard="", sample_index=0, key=prompt.name, length=len(ids),
                num_images=len(prompt.sample.image_grid_thw), num_videos=len(prompt.sample.video_grid_thw), failed=False,
            ),
        )  # fmt: skip
    return collate(
        PackedSample(samples=samples, references=references),
        step=0,
        position_kind=position_kind,
        pad_id=tokenizer.pad_id,
        image_pad_id=tokenizer.image_pad_id,
        video_pad_id=tokenizer.video_pad_id,
        pad_multiple=config.packing.pad_multiple,
        patch_dim=config.image.patch_dim,
        spatial_merge_size=config.image.spatial_merge_size,
    )


def plain_text(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """The text of token ids, without special tokens."""
    special = set(tokenizer.special_ids.values())
    return str(tokenizer.backend.decode([one for one in ids if one not in special])).strip()


def _raw_prompt(line: str, where: str, directory: Path, rules: SampleRules) -> tuple[RawSample, str | None]:
    try:
        record: Any = json.loads(line)
    except ValueError as error:
        raise SampleError(f"is not valid JSON ({error})") from error
    if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
        raise SampleError('must be an object with a text "prompt"')
    unknown = sorted(record.keys() - _KEYS)
    if unknown:
        raise SampleError(f"has the unknown key {unknown[0]!r}, known keys are {', '.join(sorted(_KEYS))}")
    images, expected = record.get("images", []), record.get("expected")
    if not isinstance(images, list) or not all(isinstance(one, str) for one in images):
        raise SampleError('"images" must be a list of file names')
    if expected is not None and not isinstance(expected, str):
        raise SampleError('"expected" must be a text')
    media = tuple((directory / name).read_bytes() for name in images)
    sizes = tuple(MediaSize(*read_size(content, decode_limit=rules.image.decode_limit)) for content in media)
    content = [*({"type": "image"} for _ in images), {"type": "text", "text": record["prompt"]}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": expected or "?"}]
    text = json.dumps({"messages": messages}).encode()
    return RawSample(key=where, record=text, is_json=True, media=media, sizes=sizes), expected


def _prompt(raw: RawSample, name: str, rules: SampleRules, tokenizer: Tokenizer) -> Prompt:
    encoding = encode_sample(raw, rules=rules, tokenizer=tokenizer)
    whole = decode_sample(raw, encoding, tokenizer=tokenizer)
    has_label = whole.labels != IGNORE_INDEX
    if not has_label.any():
        raise SampleError("has no answer")
    first = int(has_label.argmax())  # labels are shifted: this token is the last one of the prompt
    ids = whole.input_ids[: first + 1]
    if not encoding.sample.messages:
        ids, first = ids[:0], 0  # a text without a conversation has no prompt
    ends = np.flatnonzero(~has_label[first:])
    answer = whole.labels[first : first + int(ends[0]) if len(ends) else None]
    expected = plain_text(answer.tolist(), tokenizer)
    return Prompt(
        name=name,
        text=plain_text(ids.tolist(), tokenizer),
        expected=expected,
        sample=_cut(whole, ids, tokenizer, rules),
    )


def _cut(whole: TokenizedSample, ids: NDArray[np.int64], tokenizer: Tokenizer, rules: SampleRules) -> TokenizedSample:
    """The sample up to these tokens, with the media whose placeholders they have."""
    merged = rules.image.spatial_merge_size**2

    def kept(grids: NDArray[np.int64], pad_id: int | None) -> tuple[NDArray[np.int64], int]:
        """Grids of the media before the cut, and the number of their patches."""
        patches = np.cumsum(grids.prod(axis=1))
        count = int(np.searchsorted(patches // merged, int((ids == pad_id).sum()), side="right"))
        return grids[:count], int(patches[count - 1]) if count else 0

    images, num_patches = kept(whole.image_grid_thw, tokenizer.image_pad_id)
    videos, num_video_patches = kept(whole.video_grid_thw, tokenizer.video_pad_id)
    return TokenizedSample(
        input_ids=ids,
        labels=np.full(len(ids), IGNORE_INDEX, np.int64),
        pixel_values=whole.pixel_values[:num_patches],
        image_grid_thw=images,
        pixel_values_videos=whole.pixel_values_videos[:num_video_patches],
        video_grid_thw=videos,
        seconds_per_grid=whole.seconds_per_grid[: len(videos)],
    )
