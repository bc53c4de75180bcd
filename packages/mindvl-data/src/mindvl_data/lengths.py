# SPDX-License-Identifier: Apache-2.0
"""How many tokens and patches each sample of a source takes, exactly, before anything is decoded.

Comes after the index, before the planner. Text is measured once per tokenizer, by the code that encodes it at run
time, and kept beside the index. Where a text holds coordinates its length depends on the pixel budget too, so for
shards with coordinates the budget is part of the file's name. A row can therefore never overflow.
"""

import hashlib
import logging
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindvl_data.config import ImageConfig, SourceConfig, source_image
from mindvl_data.errors import BadSample
from mindvl_data.images import count_patches, smart_resize
from mindvl_data.index import FolderIndex, Progress, ShardIndex, open_index, write_atomically
from mindvl_data.samples import parse_sample
from mindvl_data.shards import BLOCK, ShardFiles
from mindvl_data.tokenization import Tokenizer
from mindvl_data.types import RawSample

logger = logging.getLogger(__name__)


class SourceIndex:
    """One source of the mixture: its index, its pixel budget, and the lengths that follow from them."""

    def __init__(self, source: SourceConfig, image: ImageConfig, tokenizer: Tokenizer, files: ShardFiles) -> None:
        self.name = source.name
        self.weight = source.weight
        self.max_epochs = source.max_epochs
        self.index: FolderIndex = open_index(source.path)
        self.image = source_image(image, source)
        self._tokenizer = tokenizer
        self._files = files
        self._cache: dict[int, tuple[NDArray[np.uint32], NDArray[np.uint32]]] = {}
        self.shard_sizes = [len(shard.samples) for shard in self.index.shards]

    def lengths(self, shard: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """(tokens, patches) of each sample of a shard; 0 tokens marks a sample that cannot be used."""
        if shard not in self._cache:
            index = self.index.shards[shard]
            text = measure_text(index, self.image, self._tokenizer, self._files)
            patches = sample_patches(index, self.image)
            usable = (text > 0) & (patches >= 0)
            visual_tokens = patches // self.image.spatial_merge_size**2
            tokens = np.where(usable, text + visual_tokens, 0).astype(np.uint32)
            self._cache[shard] = tokens, np.where(usable, patches, 0).astype(np.uint32)
        return self._cache[shard]

    def read(self, shard: int, row: int) -> RawSample:
        """The bytes of one sample, in one range read."""
        return read_sample(self.index.shards[shard], row, self._files)

    def image_sizes(self, shard: int, row: int) -> list[tuple[int, int]]:
        """(height, width) of its pictures as the index has them."""
        return _image_sizes(self.index.shards[shard], row)


def read_sample(shard: ShardIndex, row: int, files: ShardFiles) -> RawSample:
    """The bytes of one sample, in one range read, checked against the crc of the index.

    Raises:
        BadSample: The bytes are not those that were indexed.
    """
    entry = shard.samples[row]
    start = int(entry["offset"]) - BLOCK  # with the tar header of the first member, which holds the key
    content = files.read(shard.path, start, BLOCK + int(entry["length"]))
    first = int(entry["first_member"])
    members = shard.members[first : first + int(entry["num_members"])]
    pieces = [
        content[offset - start : offset - start + length]
        for offset, length in zip(members["offset"].tolist(), members["length"].tolist(), strict=True)
    ]
    crc = 0
    for piece in pieces:
        crc = zlib.crc32(piece, crc)
    if crc != int(entry["crc"]):
        raise BadSample("contents differ from what was indexed (crc32)")
    key = content[:100].rstrip(b"\0").decode("utf-8", "replace").split(".", 1)[0]
    return RawSample(key=key, record=pieces[0], is_json=bool(entry["is_json"]), media=tuple(pieces[1:]))


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


def measure_text(shard: ShardIndex, image: ImageConfig, tokenizer: Tokenizer, files: ShardFiles) -> NDArray[np.int64]:
    """Text tokens of each sample, the marks around pictures included; 0 where a sample cannot be used.

    Read from the file beside the index where there is one, else measured and kept there.
    """
    path = _lengths_path(shard, image, tokenizer)
    if path.is_file():
        counts = np.fromfile(path, "<u4")
        if len(counts) == len(shard.samples):
            return counts.astype(np.int64)
    logger.info("measuring the text of %s for this tokenizer, once", shard.path)
    counts = np.fromiter(
        (_measure_sample(shard, row, image, tokenizer, files) for row in range(len(shard.samples))), np.int64
    )
    try:
        write_atomically(path, counts.astype("<u4").tobytes())
    except OSError as error:  # data folders are often read-only; then every start measures again
        logger.warning(
            "text lengths cannot be kept beside %s (%s); they are measured at every start", shard.path, error
        )
    return counts


def measure_folder(
    folder: Path | str, tokenizer: Tokenizer, image: ImageConfig, *, progress: Progress | None = None
) -> int:
    """Measure all shards of an indexed folder ahead of the first run; returns the number of text tokens."""
    index, files = open_index(folder), ShardFiles()
    total, tokens = len(index.shards), 0
    try:
        for done, shard in enumerate(index.shards, 1):
            tokens += int(measure_text(shard, image, tokenizer, files).sum())
            if progress is not None:
                progress(done, total)
    finally:
        files.close()
    return tokens


def image_scales(sizes: list[tuple[int, int]], image: ImageConfig) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """(original, resized) size of each picture."""
    budget: dict[str, Any] = {"min_pixels": image.min_pixels, "max_pixels": image.max_pixels}
    return [((h, w), smart_resize(h, w, multiple=image.multiple, **budget)) for h, w in sizes]


def _measure_sample(shard: ShardIndex, row: int, image: ImageConfig, tokenizer: Tokenizer, files: ShardFiles) -> int:
    try:
        sample = parse_sample(read_sample(shard, row, files))
        encoded = tokenizer.encode(sample, image_scales(_image_sizes(shard, row), image))
    except BadSample as error:
        logger.warning("sample %d of %s is left out: %s", row, shard.path, error)
        return 0
    return len(encoded.ids) - sample.num_images


def _image_sizes(shard: ShardIndex, row: int) -> list[tuple[int, int]]:
    first, count = int(shard.samples["first_member"][row]), int(shard.samples["num_members"][row])
    members = shard.members[first + 1 : first + count]
    return list(zip(members["height"].tolist(), members["width"].tolist(), strict=True))


def _lengths_path(shard: ShardIndex, image: ImageConfig, tokenizer: Tokenizer) -> Path:
    parts = [shard.digest, tokenizer.identity]
    if shard.samples["has_coordinates"].any():
        parts.append(f"{image.min_pixels} {image.max_pixels} {image.multiple}")
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return shard.path.with_name(f"{shard.path.stem}.{digest}.len")
