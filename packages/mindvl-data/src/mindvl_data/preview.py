# SPDX-License-Identifier: Apache-2.0
"""One sample at each stage of the data path, as plain data.

Calls the functions of the loader one after another and keeps the result of each. preview_media.py adds turns and media
as the model receives them.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindvl_data.config import ImageConfig, SampleRules
from mindvl_data.encode import (
    Encoding,
    Scale,
    encode_sample,
    image_scales,
    sample_image,
    tokens_per_placeholder,
)
from mindvl_data.errors import DataError
from mindvl_data.samples import parse_sample
from mindvl_data.shards.files import ShardFiles
from mindvl_data.shards.index import DirectoryIndex, open_index
from mindvl_data.shards.index_format import hash_key
from mindvl_data.shards.reading import read_sample
from mindvl_data.tokenization import Tokenizer, expand
from mindvl_data.types import IGNORE_INDEX, RawSample, Sample

_REPLACEMENT = "\ufffd"
_MOST_TOKENS = 8  # of two characters of four bytes that a token splits


@dataclass(frozen=True, kw_only=True)
class TokenRun:
    """The text of one token, of the tokens that form one character together, or a run of equal placeholders.

    Attributes:
        count: Number of tokens.
        repeats: How often the text stands there; 1 except for placeholders and padding.
    """

    text: str
    count: int
    repeats: int
    in_loss: bool  # the token is a prediction target
    visual: bool


@dataclass(frozen=True, kw_only=True)
class Preview:
    """The stages of one sample."""

    key: str
    shard: str
    raw: RawSample
    sample: Sample  # with all turns, also those that are cut
    rules: SampleRules
    image: ImageConfig  # with the pixel limits of this sample
    scales: list[Scale]  # (original, resized) size of each image
    encoding: Encoding | None  # None without a tokenizer
    tokens: list[TokenRun]  # empty without a tokenizer

    @property
    def num_cut(self) -> int:
        """Number of messages that are cut because the sample is too long."""
        return len(self.sample.messages) - len(self.encoding.sample.messages) if self.encoding else 0

    def as_json(self, stage: str) -> dict[str, Any]:
        """The values of a stage (raw, sample or tokens) for JSON."""
        head: dict[str, Any] = {"key": self.key, "shard": self.shard, "stage": stage}
        if stage == "raw":
            return head | {"record": self.raw.record.decode(), "media_bytes": [len(m) for m in self.raw.media]}
        head["images"] = [{"size": list(old), "resized": list(new)} for old, new in self.scales]
        if stage == "sample":
            return head | asdict(self.sample)
        assert self.encoding is not None
        figures = {"num_tokens": self.encoding.num_tokens, "num_patches": self.encoding.num_patches}
        return head | figures | {"cut_messages": self.num_cut, "tokens": [asdict(run) for run in self.tokens]}


def preview_sample(
    directory: Path | str,
    *,
    key: str | None = None,
    tokenizer: Tokenizer | None = None,
    rules: SampleRules | None = None,
) -> Preview:
    """Read one sample of an indexed directory.

    Args:
        directory: Indexed directory of shards.
        key: Key of the sample; the first sample if None.
        tokenizer: Encodes the sample; without it there are no tokens.
        rules: Limits of the source; the defaults if None.

    Raises:
        DataError: The key does not exist, or the sample is invalid.
    """
    rules = rules or SampleRules(image=ImageConfig())
    index = open_index(directory)
    shard_number, row = (0, 0) if key is None else _find(index, key)
    shard = index.shards[shard_number]
    files = ShardFiles()
    try:
        raw = read_sample(shard, row, files)
    finally:
        files.close()
    sample = parse_sample(raw)
    image = sample_image(rules.image, sample)
    encoding, tokens = None, []
    if tokenizer is not None:
        encoding = encode_sample(raw, rules=rules, tokenizer=tokenizer)
        merged = tokens_per_placeholder(encoding.grids, raw.sizes, image, rules.video)
        tokens = token_runs(*expand(encoding, merged, tokenizer.media_pad_ids), tokenizer)
    return Preview(
        key=raw.key,
        shard=shard.name,
        raw=raw,
        sample=sample,
        rules=rules,
        image=image,
        scales=image_scales(raw.sizes, image),
        encoding=encoding,
        tokens=tokens,
    )


def token_runs(input_ids: Any, labels: Any, tokenizer: Tokenizer) -> list[TokenRun]:
    """Decode tokens to text, the tokens of one character together; equal placeholders become one run."""
    ids = np.asarray(input_ids).tolist()
    in_loss = np.concatenate(([False], np.asarray(labels)[:-1] != IGNORE_INDEX)).tolist()
    runs: list[TokenRun] = []
    start = 0
    while start < len(ids):
        token = ids[start]
        stop = start + 1
        visual = token in tokenizer.media_pad_ids
        if visual or token == tokenizer.pad_id:
            while stop < len(ids) and ids[stop] == token:
                stop += 1
            text, repeats = tokenizer.backend.decode([token], skip_special_tokens=False), stop - start
        else:
            longest = next(
                (place for place in range(start + 1, len(ids)) if in_loss[place] != in_loss[start]), len(ids)
            )
            stop, text = _whole_characters(ids, start, min(longest, start + _MOST_TOKENS), tokenizer)
            repeats = 1
        runs.append(TokenRun(text=text, count=stop - start, repeats=repeats, in_loss=in_loss[start], visual=visual))
        start = stop
    return runs


def _whole_characters(ids: list[int], start: int, longest: int, tokenizer: Tokenizer) -> tuple[int, str]:
    """The smallest number of tokens from `start` that end with a whole character: (end, text).

    Byte-level tokenizers split a character of several bytes over tokens; each alone is decoded as U+FFFD.
    """
    first = tokenizer.backend.decode([ids[start]], skip_special_tokens=False)
    text = first
    for stop in range(start + 1, longest + 1):
        text = tokenizer.backend.decode(ids[start:stop], skip_special_tokens=False)
        if _REPLACEMENT not in text:
            return stop, text
    return start + 1, first  # the bytes are no character


def _find(index: DirectoryIndex, key: str) -> tuple[int, int]:
    wanted = np.uint64(hash_key(key))
    for number, shard in enumerate(index.shards):
        rows = np.flatnonzero(shard.samples["key_hash"] == wanted)
        if len(rows):
            return number, int(rows[0])
    raise DataError(f"{index.directory}: key {key!r} does not exist. Omit --key to see the first sample.")
