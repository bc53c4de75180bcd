# SPDX-License-Identifier: Apache-2.0
"""The fixed-width, memory-mapped index of shards: what is on disk, and how it is opened.

Written by indexing.py; planner and reader know samples only through it. Picture sizes are stored, not token counts,
so that pixel budgets can change without a new index. Opening reads the manifest alone: a hundred million samples cost
a few megabytes until they are used. Beside each shard `NAME.tar` lies `NAME.idx`: magic (8 bytes), three
little-endian uint64 (samples, members, bytes of the shard), then the two arrays below.
"""

import hashlib
import json
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from mindvl_data.config import StoreConfig
from mindvl_data.errors import DataError
from mindvl_data.shards.location import Location, is_remote, join

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
    path: Location  # the shard; an address when it lies in an object store
    digest: str  # sha256 of the index file
    samples: NDArray[Any]  # SAMPLE_DTYPE
    members: NDArray[Any]  # MEMBER_DTYPE


class Shards(Sequence[ShardIndex]):
    """The shards of a folder in name order; each is mapped when it is asked for, and the last few stay mapped.

    A folder can have more shards than a process may map, and what is mapped counts as its memory. Safe to use from
    several threads.

    Args:
        names: File names of the shards.
        sizes: Samples of each shard.
        digests: sha256 of each index file, 32 bytes each, end to end.
    """

    def __init__(
        self,
        folder: Location,
        names: Sequence[str],
        sizes: NDArray[np.int64],
        digests: bytes,
        *,
        store: StoreConfig | None,
        max_mapped: int,
    ) -> None:
        self._folder, self._store = folder, store
        self.names, self.sizes = tuple(names), sizes
        self._digests = digests
        self._max_mapped = max_mapped
        self._mapped: OrderedDict[int, ShardIndex] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, number: int) -> ShardIndex: ...
    @overload
    def __getitem__(self, number: slice) -> list[ShardIndex]: ...
    def __getitem__(self, number: int | slice) -> ShardIndex | list[ShardIndex]:
        """Map one shard, or several.

        Raises:
            DataError: The index file is missing or damaged.
        """
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        number = range(len(self))[number]
        with self._lock:
            if number in self._mapped:
                self._mapped.move_to_end(number)
            else:
                self._mapped[number] = self._map(number)
                if len(self._mapped) > self._max_mapped:
                    self._mapped.popitem(last=False)  # whoever still uses its arrays keeps them mapped
            return self._mapped[number]

    def _map(self, number: int) -> ShardIndex:
        name = self.names[number]
        digest = self._digests[32 * number : 32 * number + 32].hex()
        index_name = _index_name(name)
        try:
            with open(_on_disk(join(self._folder, index_name), digest, self._store), "rb", buffering=0) as file:
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError as error:
            raise _missing(index_name, self._folder) from error
        except ValueError:  # an empty file cannot be mapped
            content = None
        samples, members = _arrays(content) if content else (None, None)
        if samples is None or members is None or len(samples) != self.sizes[number]:
            raise DataError(
                f"index file is damaged. {join(self._folder, index_name)}. "
                f"Run `mindvl data index {self._folder}` again."
            )
        return ShardIndex(name=name, path=join(self._folder, name), digest=digest, samples=samples, members=members)


@dataclass(frozen=True, kw_only=True)
class FolderIndex:
    """All shards of a folder, in name order."""

    folder: Location
    shards: Shards
    num_samples: int
    num_images: int
    num_videos: int
    identity: str  # hash over all index files, so over every key, size and content crc

    @property
    def is_text(self) -> bool:
        return self.num_images + self.num_videos == 0


def open_index(folder: Location, *, store: StoreConfig | None = None, max_mapped: int = 64) -> FolderIndex:
    """Read the manifest of a folder; index files are mapped later, shard by shard.

    Sizes of all files of a local folder are compared with the manifest; in an object store, where each look would be
    a request, a file is checked when it is first used.

    Args:
        store: How an object store is read, for a folder that is an address.
        max_mapped: Index files that stay mapped.

    Raises:
        DataError: No index, another version, or shards that changed since.
    """
    if isinstance(folder, str) and not is_remote(folder):
        folder = Path(folder)
    manifest = _read_manifest(folder, store)
    entries = manifest["shards"]
    if not is_remote(folder):
        _check_sizes(Path(folder), entries)
    digest = hashlib.sha256("".join(entry["index_sha256"] for entry in entries).encode())
    shards = Shards(
        folder,
        [entry["name"] for entry in entries],
        np.array([entry["samples"] for entry in entries], np.int64),
        b"".join(bytes.fromhex(entry["index_sha256"]) for entry in entries),
        store=store,
        max_mapped=max_mapped,
    )
    return FolderIndex(
        folder=folder,
        shards=shards,
        num_samples=manifest["samples"],
        num_images=manifest["images"],
        num_videos=manifest["videos"],
        identity=digest.hexdigest(),
    )


def key_of(raw_name: str) -> int:
    """64-bit hash of a sample's key."""
    return int.from_bytes(hashlib.blake2b(raw_name.encode(), digest_size=8).digest(), "little")


def write_atomically(path: Path, content: bytes) -> None:
    """Write under another name, flush to disk, rename."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.partial")
    with open(partial, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _on_disk(location: Location, sha256: str | None, store: StoreConfig | None) -> Path:
    """The file itself, or the copy of an object that is kept on this machine."""
    if not isinstance(location, str):
        return location
    from mindvl_data.shards.remote import local_copy  # it writes with write_atomically, so it comes after this file

    return local_copy(location, sha256, store)


def _read_manifest(folder: Location, store: StoreConfig | None) -> dict[str, Any]:
    try:
        text = _on_disk(join(folder, MANIFEST_NAME), None, store).read_text()
    except FileNotFoundError as error:
        raise DataError(f"no index. {folder}. Run `mindvl data index {folder}`.") from error
    again = f"{folder}. Run `mindvl data index` again."
    try:
        manifest: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise DataError(f"{MANIFEST_NAME} is damaged: {error}. {again}") from error
    if manifest.get("version") != MANIFEST_VERSION:
        raise DataError(f"index version {manifest.get('version')} instead of {MANIFEST_VERSION}. {again}")
    return manifest


def _check_sizes(folder: Path, entries: Sequence[dict[str, Any]]) -> None:
    """Refuse files that are missing or have another size than when they were indexed; one listing of the folder."""
    with os.scandir(folder) as listing:
        files = {file.name: file for file in listing if file.name.endswith((".tar", ".idx"))}
    for entry in entries:
        index_name = _index_name(entry["name"])
        for name in (entry["name"], index_name):
            if name not in files:
                raise _missing(name, folder)
        records = entry["samples"] * (SAMPLE_DTYPE.itemsize + MEMBER_DTYPE.itemsize)
        smallest = _HEADER_BYTES + records + entry["images"] * MEMBER_DTYPE.itemsize
        if files[index_name].stat().st_size < smallest:
            raise DataError(f"index file is damaged. {folder / index_name}. Run `mindvl data index {folder}` again.")
        if files[entry["name"]].stat().st_size != entry["bytes"]:
            raise DataError(
                f"shard changed since it was indexed. {folder / entry['name']}. Run `mindvl data index {folder}` again."
            )


def _arrays(content: mmap.mmap) -> tuple[NDArray[Any], NDArray[Any]] | tuple[None, None]:
    """(samples, members) of an index file; None where it is not whole."""
    if content[: len(INDEX_MAGIC)] != INDEX_MAGIC or len(content) < _HEADER_BYTES:
        return None, None
    num_samples, num_members, _ = np.frombuffer(content, "<u8", 3, len(INDEX_MAGIC)).tolist()
    split = _HEADER_BYTES + num_samples * SAMPLE_DTYPE.itemsize
    if split + num_members * MEMBER_DTYPE.itemsize != len(content):
        return None, None
    samples = np.frombuffer(content, SAMPLE_DTYPE, num_samples, _HEADER_BYTES)
    return samples, np.frombuffer(content, MEMBER_DTYPE, num_members, split)


def _index_name(shard_name: str) -> str:
    return f"{shard_name.removesuffix('.tar')}.idx"


def _missing(name: str, folder: Location) -> DataError:
    return DataError(f"{name} is missing. {folder}. Put it back or run `mindvl data index` again.")
