# SPDX-License-Identifier: Apache-2.0
"""The fixed-width, memory-mapped index of shards: what is on disk, and how it is opened.

Written by indexing.py; planner and reader know samples only through it. Picture sizes are stored, not
token counts, so that pixel budgets can change without a new index. Beside each shard `NAME.tar` lies `NAME.idx`:
magic (8 bytes), three little-endian uint64 (samples, members, bytes of the shard), then the two arrays below.
"""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindvl_data.errors import DataError

MANIFEST_NAME = "manifest.json"
MANIFEST_VERSION = 2
INDEX_MAGIC = b"MVLIDX02"
_HEADER_BYTES = len(INDEX_MAGIC) + 3 * 8

SAMPLE_DTYPE = np.dtype(
    [
        ("offset", "<u8"),  # first byte of the sample's contents
        ("length", "<u4"),  # bytes from there to the end of its last member
        ("first_member", "<u4"),
        ("num_members", "<u2"),  # the record, then pictures and videos in order
        ("has_coordinates", "u1"),  # its text depends on the pixel budget
        ("is_json", "u1"),
        ("key_hash", "<u8"),
        ("crc", "<u4"),  # crc32 over the members' contents, in order
        ("min_pixels", "<u4"),  # the sample's own limits, as its record says; 0 where it has none
        ("max_pixels", "<u4"),
    ]
)
MEMBER_DTYPE = np.dtype(
    [
        ("offset", "<u8"),
        ("length", "<u4"),
        ("height", "<u4"),  # pixels as shown; 0 for a record
        ("width", "<u4"),
        ("frames", "<u4"),  # of a video; 0 for anything else
        ("fps", "<f4"),  # frames per second of a video
    ]
)


@dataclass(frozen=True, kw_only=True)
class ShardIndex:
    """The index of one shard."""

    name: str  # file name of the shard
    path: Path | str  # the shard; an address when it lies in an object store
    digest: str  # sha256 of the index file
    samples: NDArray[Any]  # SAMPLE_DTYPE
    members: NDArray[Any]  # MEMBER_DTYPE


@dataclass(frozen=True, kw_only=True)
class FolderIndex:
    """All shards of a folder, in name order."""

    folder: Path
    shards: tuple[ShardIndex, ...]
    num_samples: int
    num_images: int
    identity: str  # hash over all index files, so over every key, size and content crc

    @property
    def is_text(self) -> bool:
        return self.num_images == 0


def open_index(folder: Path | str) -> FolderIndex:
    """Map the index of a folder into memory.

    Raises:
        DataError: No index, another version, or shards that changed since.
    """
    folder = Path(folder)
    manifest_path = folder / MANIFEST_NAME
    if not manifest_path.is_file():
        raise DataError(f"no index. {folder}. Run `mindvl data index {folder}`.")
    manifest = json.loads(manifest_path.read_text())
    if manifest.get("version") != MANIFEST_VERSION:
        raise DataError(
            f"index version {manifest.get('version')} instead of {MANIFEST_VERSION}. {folder}. "
            "Run `mindvl data index` again."
        )
    shards = tuple(_open_shard_index(folder, entry) for entry in manifest["shards"])
    digest = hashlib.sha256("".join(shard.digest for shard in shards).encode())
    return FolderIndex(
        folder=folder,
        shards=shards,
        num_samples=manifest["samples"],
        num_images=manifest["images"],
        identity=digest.hexdigest(),
    )


def key_of(raw_name: str) -> int:
    """64-bit hash of a sample's key."""
    return int.from_bytes(hashlib.blake2b(raw_name.encode(), digest_size=8).digest(), "little")


def write_atomically(path: Path, content: bytes) -> None:
    """Write under another name, flush to disk, rename."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with open(partial, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _open_shard_index(folder: Path, entry: dict[str, Any]) -> ShardIndex:
    path = folder / entry["name"]
    index_path = path.with_suffix(".idx")
    for file in (path, index_path):
        if not file.is_file():
            raise DataError(f"{file.name} is missing. {folder}. Put it back or run `mindvl data index` again.")
    mapped = np.memmap(index_path, np.uint8, mode="r")
    num_samples, num_members, shard_bytes = (
        np.frombuffer(mapped[len(INDEX_MAGIC) : _HEADER_BYTES].tobytes(), "<u8").tolist()
        if mapped[: len(INDEX_MAGIC)].tobytes() == INDEX_MAGIC
        else (-1, -1, -1)
    )
    split = _HEADER_BYTES + num_samples * SAMPLE_DTYPE.itemsize
    whole = split + num_members * MEMBER_DTYPE.itemsize == len(mapped) and num_samples == entry["samples"]
    if not whole or path.stat().st_size != shard_bytes:
        what = "shard changed since it was indexed" if whole else "index file is damaged"
        raise DataError(f"{what}. {path if whole else index_path}. Run `mindvl data index {folder}` again.")
    return ShardIndex(
        name=path.name,
        path=path,
        digest=entry["index_sha256"],
        samples=mapped[_HEADER_BYTES:split].view(SAMPLE_DTYPE).view(np.ndarray),  # memmap objects are slow to slice
        members=mapped[split:].view(MEMBER_DTYPE).view(np.ndarray),
    )
