# SPDX-License-Identifier: Apache-2.0
"""Index entry -> RawSample: the bytes of samples, checked against the index.

Comes after the plan, before samples.py reads the record.
"""

import zlib
from collections.abc import Sequence

import numpy as np

from mindvl_data.errors import BadSample
from mindvl_data.shards.files import Range, ShardFiles
from mindvl_data.shards.index import ShardIndex
from mindvl_data.shards.tar import BLOCK, name_in_header, split_name
from mindvl_data.types import MediaSize, RawSample


def read_sample(shard: ShardIndex, row: int, files: ShardFiles) -> RawSample:
    """The bytes of one sample, in one range read, checked against the crc of the index.

    Raises:
        BadSample: The bytes are not those that were indexed.
    """
    (sample,) = read_samples(shard, [row], files)
    if isinstance(sample, BadSample):
        raise sample
    return sample


def read_samples(shard: ShardIndex, rows: Sequence[int], files: ShardFiles) -> list[RawSample | BadSample]:
    """Several samples of one shard, in the order asked; neighbours are read together.

    A sample whose bytes are not those that were indexed comes back as the BadSample that says so.
    """
    ranges = [_range_of(shard, row) for row in rows]
    samples: list[RawSample | BadSample] = []
    for row, (start, length), content in zip(rows, ranges, files.read_ranges(shard.path, ranges), strict=True):
        sample = _parse(shard, row, content)
        # what the cache kept may be of an older shard at the same address
        if isinstance(sample, BadSample) and (again := files.read_again(shard.path, start, length)) is not None:
            sample = _parse(shard, row, again)
        samples.append(sample)
    return samples


def read_records(shard: ShardIndex, rows: Sequence[int], files: ShardFiles) -> list[RawSample]:
    """The records of samples without their pictures and videos: all that measuring needs, a small part of the bytes.

    They are not checked: the crc of the index covers whole samples, which are checked when they are used.
    """
    records = shard.members[shard.samples["first_member"][rows].astype(np.int64)]
    ranges = [(int(offset) - BLOCK, int(length) + BLOCK) for offset, length in records[["offset", "length"]].tolist()]
    return [
        RawSample(
            key=_key(content),
            record=content[BLOCK:],
            is_json=bool(shard.samples["is_json"][row]),
            media=(),
            sizes=_sizes(shard, row),
        )
        for row, content in zip(rows, files.read_ranges(shard.path, ranges), strict=True)
    ]


def _range_of(shard: ShardIndex, row: int) -> Range:
    """With the tar header of the first member, which holds the key."""
    entry = shard.samples[row]
    return int(entry["offset"]) - BLOCK, int(entry["length"]) + BLOCK


def _parse(shard: ShardIndex, row: int, content: bytes) -> RawSample | BadSample:
    entry = shard.samples[row]
    start = int(entry["offset"]) - BLOCK
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
        return BadSample("contents differ from what was indexed (crc32)")
    return RawSample(
        key=_key(content),
        record=pieces[0],
        is_json=bool(entry["is_json"]),
        media=tuple(pieces[1:]),
        sizes=_sizes(shard, row),
    )


def _key(content: bytes) -> str:
    return split_name(name_in_header(content[:BLOCK]))[0]


def _sizes(shard: ShardIndex, row: int) -> tuple[MediaSize, ...]:
    first, count = int(shard.samples["first_member"][row]), int(shard.samples["num_members"][row])
    media = shard.members[first + 1 : first + count]
    return tuple(MediaSize(*member) for member in media[["height", "width", "frames", "fps"]].tolist())
