# SPDX-License-Identifier: Apache-2.0
"""Index entry -> RawSample: the bytes of samples, checked against the index.

Comes after the plan, before samples.py reads the record.
"""

import zlib

from mindvl_data.errors import BadSample
from mindvl_data.shards.files import ShardFiles
from mindvl_data.shards.index import ShardIndex
from mindvl_data.shards.tar import BLOCK
from mindvl_data.types import MediaSize, RawSample


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
    sizes = tuple(MediaSize(*member) for member in members[["height", "width", "frames", "fps"]][1:].tolist())
    return RawSample(key=key, record=pieces[0], is_json=bool(entry["is_json"]), media=tuple(pieces[1:]), sizes=sizes)
