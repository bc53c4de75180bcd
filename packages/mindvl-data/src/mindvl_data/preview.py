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
from mindvl_data.encode import Encoding, Scale, encode_sample, image_scales, sample_image
from mindvl_data.errors import DataError
from mindvl_data.samples import parse_sample
from mindvl_data.shards.files import ShardFiles
from mindvl_data.shards.index import DirectoryIndex, open_index
from mindvl_data.shards.index_format import hash_key
from mindvl_data.shards.reading import read_sample
from mindvl_data.tokenization import Tokenizer, expand
from mindvl_data.types import IGNORE_INDEX, RawSample, Sample


@dataclass(frozen=True, kw_only=True)
class TokenRun:
    """The text of one token, or a run of equal placeholders."""

    text: str
    count: int
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
        merged = [t * h * w // image.spatial_merge_size**2 for t, h, w in encoding.grids]
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
    """Decode tokens to text; consecutive equal placeholders become one run with a count."""
    in_loss = np.concatenate(([False], np.asarray(labels)[:-1] != IGNORE_INDEX))
    runs: list[TokenRun] = []
    before = None
    for token, is_in_loss in zip(np.asarray(input_ids).tolist(), in_loss.tolist(), strict=True):
        visual = token in tokenizer.media_pad_ids
        if token == before and (visual or token == tokenizer.pad_id):
            last = runs.pop()
            runs.append(TokenRun(text=last.text, count=last.count + 1, in_loss=last.in_loss, visual=visual))
        else:
            text = tokenizer.backend.decode([token], skip_special_tokens=False)
            runs.append(TokenRun(text=text, count=1, in_loss=is_in_loss, visual=visual))
        before = token
    return runs


def _find(index: DirectoryIndex, key: str) -> tuple[int, int]:
    wanted = np.uint64(hash_key(key))
    for number, shard in enumerate(index.shards):
        rows = np.flatnonzero(shard.samples["key_hash"] == wanted)
        if len(rows):
            return number, int(rows[0])
    raise DataError(f"{index.directory}: key {key!r} does not exist. Omit --key to see the first sample.")
