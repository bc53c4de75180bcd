# SPDX-License-Identifier: Apache-2.0
"""The binary format of an index file (docs/reference/data-format.md): fixed-width arrays after a short header.

Below the manifest and the index. The index of the shard `NAME.tar` is `NAME.idx`: magic (8 bytes), three little-endian
uint64 (samples, members, bytes of the shard), then the two arrays below.
"""

import hashlib
import mmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindvl_data.shards.tar import BLOCK

INDEX_MAGIC = b"MVLIDX02"
HEADER_BYTES = len(INDEX_MAGIC) + 3 * 8

SAMPLE_DTYPE = np.dtype(
    [
        ("offset", "<u8"),  # first byte of the sample's contents
        ("length", "<u4"),  # bytes from `offset` to the end of the sample's last member
        ("first_member", "<u4"),
        ("num_members", "<u2"),  # the record, then images and videos in order
        ("has_coordinates", "u1"),  # 1 if the text depends on the pixel budget
        ("is_json", "u1"),
        ("key_hash", "<u8"),
        ("crc", "<u4"),  # crc32 over the members' contents, in order
        ("min_pixels", "<u4"),  # the sample's own limits from its record; 0 if it has none
        ("max_pixels", "<u4"),
    ]
)
MEMBER_DTYPE = np.dtype(
    [
        ("offset", "<u8"),
        ("length", "<u4"),
        ("height", "<u4"),  # pixels as displayed; 0 for a record
        ("width", "<u4"),
        ("frames", "<u4"),  # number of frames of a video; 0 otherwise
        ("fps", "<f4"),  # frames per second of a video
    ]
)

Arrays = tuple[NDArray[Any], NDArray[Any]]  # (samples, members)


def index_arrays(content: bytes | mmap.mmap) -> Arrays | None:
    """The arrays of an index file, without a copy; None if its length does not match its header."""
    if len(content) < HEADER_BYTES or content[: len(INDEX_MAGIC)] != INDEX_MAGIC:
        return None
    num_samples, num_members, _ = np.frombuffer(content, "<u8", 3, len(INDEX_MAGIC)).tolist()
    split = HEADER_BYTES + num_samples * SAMPLE_DTYPE.itemsize
    if split + num_members * MEMBER_DTYPE.itemsize != len(content):
        return None
    samples = np.frombuffer(content, SAMPLE_DTYPE, num_samples, HEADER_BYTES)
    return samples, np.frombuffer(content, MEMBER_DTYPE, num_members, split)


def is_consistent(arrays: Arrays, shard_bytes: int) -> bool:
    """Whether the members of all samples are consecutive and every byte range is inside the shard."""
    samples, members = arrays
    counts = samples["num_members"].astype(np.int64)
    if (counts < 1).any() or counts.sum() != len(members):
        return False
    if (samples["first_member"] != np.cumsum(counts) - counts).any():
        return False
    return all(
        ((part["offset"] >= BLOCK) & (part["offset"] <= shard_bytes - part["length"].astype(np.int64))).all()
        for part in arrays
    )


def index_bytes(entry: dict[str, Any]) -> int:
    """The size of a shard's index file in bytes: one member for each record, image and video."""
    members = entry["samples"] + entry["images"] + entry["videos"]
    return int(HEADER_BYTES + entry["samples"] * SAMPLE_DTYPE.itemsize + members * MEMBER_DTYPE.itemsize)


def index_name(shard: str) -> str:
    """The file name of a shard's index."""
    return f"{shard.removesuffix('.tar')}.idx"


def shard_name(index: str) -> str:
    """The file name of the shard that an index belongs to."""
    return f"{index.removesuffix('.idx')}.tar"


def hash_key(key: str) -> int:
    """The 64-bit hash of a sample's key, stored as `key_hash`."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")


def is_index(path: Path) -> bool:
    """Whether a file is a mindvl index, and not a file of another program with the same suffix."""
    with open(path, "rb") as file:
        return file.read(len(INDEX_MAGIC)) == INDEX_MAGIC


def sha256_of(path: Path) -> str:
    """The sha256 of a file as hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
