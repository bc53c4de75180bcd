# SPDX-License-Identifier: Apache-2.0
"""One sample at every stage, as data.

Stands beside the line: it runs the same functions as the loader, one after another, and keeps what each returned.
preview_media.py adds turns and media as the model receives them.
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
    """One token as shown, or a run of equal placeholders."""

    text: str
    count: int
    learned: bool  # it is what the model has to say here
    visual: bool


@dataclass(frozen=True, kw_only=True)
class Preview:
    key: str
    shard: str
    raw: RawSample
    sample: Sample  # whole, also where turns are cut
    rules: SampleRules
    image: ImageConfig  # with the limits that hold for this sample
    scales: list[Scale]  # (original, resized) size of each image
    encoding: Encoding | None  # None without a tokenizer
    tokens: list[TokenRun]  # empty without a tokenizer

    @property
    def num_cut(self) -> int:
        """Messages that are left out because the sample is too long."""
        return len(self.sample.messages) - len(self.encoding.sample.messages) if self.encoding else 0

    def as_json(self, stage: str) -> dict[str, Any]:
        """What `stage` (raw, sample or tokens) shows, as JSON values."""
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
    """Read one sample of an indexed directory, the first when no key is given.

    Raises:
        DataError: The key does not exist, or the sample cannot be used.
    """
    rules = rules or SampleRules(image=ImageConfig())
    index = open_index(directory)
    shard_number, pack = (0, 0) if key is None else _find(index, key)
    shard = index.shards[shard_number]
    files = ShardFiles()
    try:
        raw = read_sample(shard, pack, files)
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
    """Tokens with their text; equal placeholders are counted instead of repeated."""
    learned = np.concatenate(([False], np.asarray(labels)[:-1] != IGNORE_INDEX))
    runs: list[TokenRun] = []
    before = None
    for token, is_learned in zip(np.asarray(input_ids).tolist(), learned.tolist(), strict=True):
        visual = token in tokenizer.media_pad_ids
        if token == before and (visual or token == tokenizer.pad_id):
            last = runs.pop()
            runs.append(TokenRun(text=last.text, count=last.count + 1, learned=last.learned, visual=visual))
        else:
            text = tokenizer.backend.decode([token], skip_special_tokens=False)
            runs.append(TokenRun(text=text, count=1, learned=is_learned, visual=visual))
        before = token
    return runs


def _find(index: DirectoryIndex, key: str) -> tuple[int, int]:
    wanted = np.uint64(hash_key(key))
    for number, shard in enumerate(index.shards):
        packs = np.flatnonzero(shard.samples["key_hash"] == wanted)
        if len(packs):
            return number, int(packs[0])
    raise DataError(f"key {key!r} does not exist. {index.directory}. Leave --key out to see the first sample.")
