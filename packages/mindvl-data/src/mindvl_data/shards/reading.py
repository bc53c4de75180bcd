# SPDX-License-Identifier: Apache-2.0
"""Index entry -> RawSample: read the bytes of samples and verify them against the index.

Comes after the data order, before samples.py parses the record.
"""

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from zlib_ng.zlib_ng import crc32

from mindvl_data.errors import SampleError
from mindvl_data.shards.files import Content, Range, ShardFiles
from mindvl_data.shards.index import ShardIndex
from mindvl_data.shards.location import shown
from mindvl_data.shards.tar import BLOCK, name_in_header, split_name
from mindvl_data.types import MediaSize, RawSample

logger = logging.getLogger(__name__)


def read_sample(shard: ShardIndex, row: int, files: ShardFiles) -> RawSample:
    """Read one sample with one range read and verify its crc.

    Args:
        shard: The index of the shard.
        row: Position of the sample in the shard.
        files: Reads the bytes.

    Raises:
        SampleError: The bytes differ from those that were indexed.
    """
    (sample,) = read_samples(shard, [row], files)
    if isinstance(sample, SampleError):
        raise sample
    return sample


def read_samples(shard: ShardIndex, rows: Sequence[int], files: ShardFiles) -> list[RawSample | SampleError]:
    """Read several samples of one shard, in the given order; adjacent ones are read together.

    For a sample whose bytes differ from those that were indexed, the list holds a SampleError.
    """
    entries = [_entry(shard, row) for row in rows]
    ranges = [entry.range for entry in entries]
    samples: list[RawSample | SampleError] = []
    for entry, content in zip(entries, files.read_ranges(shard.path, ranges), strict=True):
        sample = _parse(entry, content)
        # The cache may hold an older shard, and a disk, network or memory error may be transient: read it once more.
        if isinstance(sample, SampleError):
            sample = _parse(entry, files.read_again(shard.path, *entry.range))
            if isinstance(sample, RawSample):
                logger.warning(
                    "%s at byte %d: the crc was wrong on the first read and right on the second. "
                    "If this repeats, check the disk and its connection.", shown(shard.path), entry.range[0],
                )  # fmt: skip
        samples.append(sample)
    return samples


def read_records(shard: ShardIndex, rows: Sequence[int], files: ShardFiles) -> list[RawSample]:
    """Read the records of samples without their images and videos, which is enough for measuring the text.

    They are not verified: the crc covers the whole sample and is checked when the sample is used.
    """
    records = shard.members[shard.samples["first_member"][rows].astype(np.int64)]
    ranges = [(int(offset) - BLOCK, int(length) + BLOCK) for offset, length in records[["offset", "length"]].tolist()]
    return [
        RawSample(
            key=_key(content),
            record=bytes(content[BLOCK:]),
            is_json=bool(shard.samples["is_json"][row]),
            media=(),
            sizes=_entry(shard, row).sizes,
        )
        for row, content in zip(rows, files.read_ranges(shard.path, ranges), strict=True)
    ]


class _Entry(NamedTuple):
    """The index entry of one sample, as Python numbers."""

    range: Range  # includes the tar header of the first member, which holds the key
    pieces: list[Range]  # record, then media; offsets relative to the range
    is_json: bool
    crc: int
    sizes: tuple[MediaSize, ...]


def _entry(shard: ShardIndex, row: int) -> _Entry:
    offset, length, first, count, _, is_json, _, crc, _, _ = shard.samples[row].item()
    start = offset - BLOCK
    members = shard.members[first : first + count].tolist()
    return _Entry(
        range=(start, length + BLOCK),
        pieces=[(member[0] - start, member[1]) for member in members],
        is_json=bool(is_json),
        crc=crc,
        sizes=tuple(MediaSize(*member[2:]) for member in members[1:]),
    )


def _parse(entry: _Entry, content: Content) -> RawSample | SampleError:
    pieces = [bytes(content[offset : offset + length]) for offset, length in entry.pieces]
    crc = 0
    for piece in pieces:
        crc = crc32(piece, crc)  # the same value as zlib's, ten times faster
    if crc != entry.crc:
        return SampleError("the crc32 of the content differs from the index")
    return RawSample(
        key=_key(content), record=pieces[0], is_json=entry.is_json, media=tuple(pieces[1:]), sizes=entry.sizes
    )


def _key(content: Content) -> str:
    return split_name(name_in_header(bytes(content[:BLOCK])))[0]
