# SPDX-License-Identifier: Apache-2.0
"""Index -> the exact number of tokens and patches of each sample, computed without decoding.

Comes after the index, before the data order. Text is measured once per tokenizer, with the code that encodes it during
training, and its lengths are stored next to the index; patches are computed from the index. A pack can therefore never
overflow.

A file of lengths is `SHARD.DIGEST.len`, little-endian, without gaps:

    offset 0    8 bytes   magic, MVLLEN02
    offset 8    uint64    number of samples
    offset 16   uint32    digest of all that follows (crc32)
    offset 20   for each sample, in the order of the index:
                uint32    tokens of its text and template, including the two special tokens around each image or video
                          but not the repeated placeholders; 0: the sample is invalid
                uint32    number of images and videos that are kept, from the first; less than all if turns are cut

DIGEST is the first 16 hex digits of the sha256 of these strings joined by a zero byte: the sha256 of the index file,
the identity of the tokenizer; and, if texts contain coordinates or turns may be cut, the repr of the rules of the source,
on which the text then depends.
"""

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from zlib_ng.zlib_ng import crc32

from mindvl_data.config import ImageConfig, SampleRules
from mindvl_data.encode import encode_sample
from mindvl_data.errors import SampleError
from mindvl_data.images import count_patches
from mindvl_data.shards.atomic import write_atomically
from mindvl_data.shards.files import ShardFiles
from mindvl_data.shards.index import ShardIndex, open_index
from mindvl_data.shards.location import shown
from mindvl_data.shards.reading import read_records
from mindvl_data.shards.remote import fetch_sidecar
from mindvl_data.tokenization import Tokenizer
from mindvl_data.types import RawSample
from mindvl_data.video import TEMPORAL_PATCH, frame_counts, frame_pixels, frame_size

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # (done, total) in shards
Lengths = tuple[NDArray[np.uint32], NDArray[np.uint32]]  # (tokens, patches) of each sample

MAGIC = b"MVLLEN02"
_RECORDS_PER_READ = 256  # records per read, so that an object store serves several at a time
_HEADER = np.dtype([("magic", "S8"), ("samples", "<u8"), ("crc", "<u4")])
_MEASURED = np.dtype([("text_tokens", "<u4"), ("kept_media", "<u4")])


def shard_lengths(shard: ShardIndex, *, rules: SampleRules, tokenizer: Tokenizer, files: ShardFiles) -> Lengths:
    """(tokens, patches) of each sample of a shard; 0 tokens for an invalid sample."""
    path = _lengths_path(shard, rules, tokenizer, files)
    measured = _read_lengths(path, len(shard.samples))
    rows = np.arange(len(shard.samples))
    if measured is None:
        logger.info("%s: measuring text lengths for this tokenizer.", shown(shard.path))
        measured = _measure(shard, rows, rules, tokenizer, files)
        _store_lengths(path, measured)
    return _lengths(shard, rows, measured, rules)


def sample_lengths(
    shard: ShardIndex, rows: NDArray[Any], *, rules: SampleRules, tokenizer: Tokenizer, files: ShardFiles
) -> Lengths:
    """(tokens, patches) of the samples at `rows`: from stored lengths, or else only these samples are measured."""
    rows = np.asarray(rows, np.int64)
    kept = _read_lengths(_lengths_path(shard, rules, tokenizer, files), len(shard.samples))
    measured = _measure(shard, rows, rules, tokenizer, files) if kept is None else kept[rows]
    return _lengths(shard, rows, measured, rules)


def is_measured(shard: ShardIndex, *, rules: SampleRules, tokenizer: Tokenizer, files: ShardFiles) -> bool:
    """Whether lengths of this shard are stored, so that `sample_lengths` does not read samples."""
    return _lengths_path(shard, rules, tokenizer, files).is_file()


def measure_directory(
    directory: Path | str, tokenizer: Tokenizer, rules: SampleRules, *, progress: Progress | None = None
) -> int:
    """Measure all shards of an indexed directory before the first run; returns the number of text tokens."""
    index, files = open_index(directory), ShardFiles()
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


def _lengths(shard: ShardIndex, rows: NDArray[Any], measured: NDArray[Any], rules: SampleRules) -> Lengths:
    text = measured["text_tokens"].astype(np.int64)
    patches = _patches(shard, rows, measured["kept_media"], rules)
    valid = (text > 0) & (patches >= 0)
    tokens = np.where(valid, text + patches // rules.image.spatial_merge_size**2, 0).astype(np.uint32)
    return tokens, np.where(valid, patches, 0).astype(np.uint32)


def _patches(shard: ShardIndex, rows: NDArray[Any], kept: NDArray[Any], rules: SampleRules) -> NDArray[np.int64]:
    """Patches of the first `kept` media of each sample; -1 if one of them is invalid."""
    samples = shard.samples[rows]
    counts = np.minimum(samples["num_members"].astype(np.int64) - 1, kept)
    owner = np.repeat(np.arange(len(rows)), counts)
    position = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    members = shard.members[samples["first_member"].astype(np.int64)[owner] + 1 + position]
    low, high = _limits(samples, rules.image)
    is_video = members["frames"] > 0
    patches = np.zeros(len(members), np.int64)
    sizes = {"patch_size": rules.image.patch_size, "multiple": rules.image.multiple}
    images = members[~is_video]
    patches[~is_video] = count_patches(
        images["height"],
        images["width"],
        min_pixels=low[owner[~is_video]],
        max_pixels=high[owner[~is_video]],
        **sizes,
    )
    if is_video.any():  # skipped for speed: most shards have no videos
        videos = members[is_video]
        used = frame_counts(videos["frames"], videos["fps"], rules.video)
        of_frame = _frame_patches(videos, used, rules)
        patches[is_video] = np.where(of_frame < 0, -1, of_frame * -(-used // TEMPORAL_PATCH))
    totals = np.bincount(owner, np.maximum(patches, 0), len(rows)).astype(np.int64)
    invalid = np.bincount(owner, patches < 0, len(rows)) > 0
    return np.where(invalid, -1, totals)


def _frame_patches(videos: NDArray[Any], used: NDArray[np.int64], rules: SampleRules) -> NDArray[np.int64]:
    """Patches of one frame of each video; -1 if its aspect ratio is refused."""
    if rules.video.budget == "per_frame":
        return count_patches(
            videos["height"],
            videos["width"],
            min_pixels=rules.video.min_pixels,
            max_pixels=frame_pixels(used, rules.video),
            patch_size=rules.image.patch_size,
            multiple=rules.image.multiple,
        )
    found = []
    for height, width, count in zip(videos["height"].tolist(), videos["width"].tolist(), used.tolist(), strict=True):
        try:
            resized = frame_size((height, width), count, rules.video, rules.image)
            found.append(resized[0] * resized[1] // rules.image.patch_size**2)
        except SampleError:
            found.append(-1)
    return np.array(found, np.int64)


def _limits(samples: NDArray[Any], image: ImageConfig) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The pixel limits of each sample: encode.sample_image, vectorized."""
    low, high = samples["min_pixels"].astype(np.int64), samples["max_pixels"].astype(np.int64)
    block = image.multiple**2
    new_low = np.where(low > 0, low, np.where(high > 0, np.minimum(image.min_pixels, high), image.min_pixels))
    new_high = np.where(high > 0, high, np.where(low > 0, np.maximum(image.max_pixels, low), image.max_pixels))
    return np.maximum(new_low, block), np.maximum(new_high, block)


def _measure(
    shard: ShardIndex, rows: NDArray[Any], rules: SampleRules, tokenizer: Tokenizer, files: ShardFiles
) -> NDArray[Any]:
    pairs = []
    for start in range(0, len(rows), _RECORDS_PER_READ):
        some = rows[start : start + _RECORDS_PER_READ].tolist()
        for row, raw in zip(some, read_records(shard, some, files), strict=True):
            pairs.append(_measure_sample(raw, row, shard, rules, tokenizer))
    return np.array(pairs, _MEASURED)


def _measure_sample(
    raw: RawSample, row: int, shard: ShardIndex, rules: SampleRules, tokenizer: Tokenizer
) -> tuple[int, int]:
    try:
        encoding = encode_sample(raw, rules=rules, tokenizer=tokenizer)
    except SampleError as error:
        logger.warning("%s: sample %d is excluded: %s.", shown(shard.path), row, error)
        return 0, 0
    return encoding.num_tokens - encoding.num_patches // rules.image.spatial_merge_size**2, len(encoding.grids)


def _read_lengths(path: Path, num_samples: int) -> NDArray[Any] | None:
    """The stored lengths, or None if the file is missing or damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if len(content) != _HEADER.itemsize + num_samples * _MEASURED.itemsize:
        return None
    header = np.frombuffer(content, _HEADER, 1)[0]
    body = content[_HEADER.itemsize :]
    if header["magic"] != MAGIC or header["samples"] != num_samples or header["crc"] != crc32(body):
        return None
    return np.frombuffer(body, _MEASURED)


def _store_lengths(path: Path, measured: NDArray[Any]) -> None:
    body = measured.tobytes()
    header = np.array([(MAGIC, len(measured), crc32(body))], _HEADER)
    try:
        write_atomically(path, header.tobytes() + body)
    except OSError as error:  # data directories are often read-only; then every start measures again
        logger.warning("%s: text lengths cannot be stored: %s. They are measured again at every start.", path, error)


def _lengths_path(shard: ShardIndex, rules: SampleRules, tokenizer: Tokenizer, files: ShardFiles) -> Path:
    parts = [shard.digest, tokenizer.identity]
    has_times = rules.video.timestamps and bool((shard.members["frames"] > 0).any())  # text that depends on the frames
    if shard.samples["has_coordinates"].any() or rules.max_tokens is not None or has_times:
        parts.append(repr(rules))
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return fetch_sidecar(shard.path, f"{shard.name.removesuffix('.tar')}.{digest}.len", files.store)
