# SPDX-License-Identifier: Apache-2.0
"""Index -> how many tokens and patches each sample takes, exactly, before anything is decoded.

Comes after the index, before the plan. Text is measured once per tokenizer, by the code that encodes it at run time,
and kept beside the index. Where a text holds coordinates its length depends on the pixel budget too, so for shards
with coordinates the budget is part of the file's name. A row can therefore never overflow.
"""

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mindvl_data.config import ImageConfig, SampleRules
from mindvl_data.encode import encode_sample
from mindvl_data.errors import BadSample
from mindvl_data.images import count_patches
from mindvl_data.shards.files import ShardFiles
from mindvl_data.shards.index import ShardIndex, open_index, write_atomically
from mindvl_data.shards.reading import read_sample
from mindvl_data.tokenization import Tokenizer

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # (done, total) in shards
Lengths = tuple[NDArray[np.uint32], NDArray[np.uint32]]  # (tokens, patches) of each sample


def shard_lengths(shard: ShardIndex, *, rules: SampleRules, tokenizer: Tokenizer, files: ShardFiles) -> Lengths:
    """(tokens, patches) of each sample of a shard; 0 tokens marks a sample that cannot be used."""
    text = _measure_text(shard, rules, tokenizer, files)
    patches = sample_patches(shard, rules.image)
    usable = (text > 0) & (patches >= 0)
    tokens = np.where(usable, text + patches // rules.image.spatial_merge_size**2, 0).astype(np.uint32)
    return tokens, np.where(usable, patches, 0).astype(np.uint32)


def sample_patches(shard: ShardIndex, image: ImageConfig) -> NDArray[np.int64]:
    """Patches of each sample of a shard; -1 where a picture is refused."""
    members = shard.members
    is_image = np.ones(len(members), np.bool_)
    is_image[shard.samples["first_member"]] = False
    patches = np.zeros(len(members), np.int64)
    patches[is_image] = count_patches(members["height"][is_image], members["width"][is_image], image)
    totals = np.add.reduceat(patches, shard.samples["first_member"].astype(np.int64))
    refused = np.logical_or.reduceat(patches < 0, shard.samples["first_member"].astype(np.int64))
    return np.where(refused, -1, totals)


def measure_folder(
    folder: Path | str, tokenizer: Tokenizer, rules: SampleRules, *, progress: Progress | None = None
) -> int:
    """Measure all shards of an indexed folder ahead of the first run; returns the number of text tokens."""
    index, files = open_index(folder), ShardFiles()
    total, tokens = len(index.shards), 0
    try:
        for done, shard in enumerate(index.shards, 1):
            lengths, patches = shard_lengths(shard, rules=rules, tokenizer=tokenizer, files=files)
            tokens += int(lengths.sum()) - int(patches.sum()) // rules.image.spatial_merge_size**2
            if progress is not None:
                progress(done, total)
    finally:
        files.close()
    return tokens


def _measure_text(shard: ShardIndex, rules: SampleRules, tokenizer: Tokenizer, files: ShardFiles) -> NDArray[np.int64]:
    """Text tokens of each sample, the marks around pictures included; 0 where a sample cannot be used.

    Read from the file beside the index where there is one, else measured and kept there.
    """
    path = _lengths_path(shard, rules, tokenizer)
    if path.is_file():
        counts = np.fromfile(path, "<u4")
        if len(counts) == len(shard.samples):
            return counts.astype(np.int64)
    logger.info("measuring the text of %s for this tokenizer, once", shard.path)
    counts = np.fromiter(
        (_measure_sample(shard, row, rules, tokenizer, files) for row in range(len(shard.samples))), np.int64
    )
    try:
        write_atomically(path, counts.astype("<u4").tobytes())
    except OSError as error:  # data folders are often read-only; then every start measures again
        logger.warning(
            "text lengths cannot be kept beside %s (%s); they are measured at every start", shard.path, error
        )
    return counts


def _measure_sample(shard: ShardIndex, row: int, rules: SampleRules, tokenizer: Tokenizer, files: ShardFiles) -> int:
    try:
        encoding = encode_sample(read_sample(shard, row, files), rules=rules, tokenizer=tokenizer)
    except BadSample as error:
        logger.warning("sample %d of %s is left out: %s", row, shard.path, error)
        return 0
    return encoding.num_tokens - encoding.num_patches // rules.image.spatial_merge_size**2


def _lengths_path(shard: ShardIndex, rules: SampleRules, tokenizer: Tokenizer) -> Path:
    parts = [shard.digest, tokenizer.identity]
    if shard.samples["has_coordinates"].any():
        parts.append(f"{rules.image.min_pixels} {rules.image.max_pixels} {rules.image.multiple}")
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return shard.path.with_name(f"{shard.path.stem}.{digest}.len")
