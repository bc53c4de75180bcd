# SPDX-License-Identifier: Apache-2.0
"""Open the memory-mapped index of a directory of shards.

Written by indexing.py, used by the data order and by reading.py. The index stores image sizes, not token counts, so
that pixel budgets can change without indexing again. Opening reads only the manifest: a hundred million samples take a
few megabytes until they are used. An index file is compared with the sha256 in the manifest on its first use.
"""

import hashlib
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
from mindvl_data.process import OwnProcess
from mindvl_data.shards.index_format import index_arrays, index_name, is_consistent
from mindvl_data.shards.location import Location, is_remote, join
from mindvl_data.shards.manifest import MANIFEST_NAME, check_files, read_manifest
from mindvl_data.shards.remote import local_copy


@dataclass(frozen=True, kw_only=True)
class ShardIndex:
    """The index of one shard."""

    name: str  # file name of the shard
    path: Location  # of the shard; an address if it is in an object store
    digest: str  # sha256 of the index file
    samples: NDArray[Any]  # SAMPLE_DTYPE
    members: NDArray[Any]  # MEMBER_DTYPE


class Shards(Sequence[ShardIndex]):
    """The shards of a directory in name order. An index file is mapped on first access; the last few stay mapped.

    A directory can have more shards than a process may map, and mapped pages count as its memory. Thread-safe.

    Args:
        directory: Path or address of the directory.
        names: File names of the shards.
        sizes: Number of samples of each shard, int64.
        num_bytes: Size of each shard in bytes, int64.
        digests: sha256 of the index files, 32 bytes each, concatenated.
        store: Settings of the object store, for a directory that is an address.
        max_mapped: Number of index files that stay mapped.
    """

    def __init__(
        self,
        directory: Location,
        names: Sequence[str],
        sizes: NDArray[np.int64],
        num_bytes: NDArray[np.int64],
        digests: bytes,
        *,
        store: StoreConfig | None,
        max_mapped: int,
    ) -> None:
        self._process = OwnProcess("index")
        self._directory, self._store = directory, store
        self.names, self.sizes = tuple(names), sizes
        self._num_bytes, self._digests = num_bytes, digests
        self._verified: dict[int, tuple[int, int, int]] = {}  # number -> inode, size and time of its index file
        self._max_mapped = max_mapped
        self._mapped: OrderedDict[int, ShardIndex] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.names)

    @property
    def digests(self) -> tuple[str, ...]:
        """sha256 of each index file, which covers every key, size and content of the shard."""
        return tuple(self._digest(number) for number in range(len(self.names)))

    @overload
    def __getitem__(self, number: int) -> ShardIndex: ...
    @overload
    def __getitem__(self, number: slice) -> list[ShardIndex]: ...
    def __getitem__(self, number: int | slice) -> ShardIndex | list[ShardIndex]:
        """Map the index of one shard or of a slice of shards.

        Raises:
            DataError: An index file is missing or damaged.
        """
        self._process.check()
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        number = range(len(self))[number]
        with self._lock:
            if number in self._mapped:
                self._mapped.move_to_end(number)
            else:
                self._mapped[number] = self._map(number)
                if len(self._mapped) > self._max_mapped:
                    self._mapped.popitem(last=False)  # the arrays stay mapped while they are referenced
            return self._mapped[number]

    def _digest(self, number: int) -> str:
        return self._digests[32 * number : 32 * number + 32].hex()

    def _map(self, number: int) -> ShardIndex:
        name = self.names[number]
        digest = self._digest(number)
        location = join(self._directory, index_name(name))
        damaged = DataError(f"{location}: the index file is damaged. Run `mindvl data index {self._directory}` again.")
        try:
            with open(_on_disk(location, digest, self._store), "rb", buffering=0) as file:
                status = os.fstat(file.fileno())
                stamp = status.st_ino, status.st_size, status.st_mtime_ns
                is_new = self._verified.get(number) != stamp
                # Hash by reading, not through the mapping: mapped pages would count as memory of this process.
                if is_new and hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    raise damaged
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError as error:
            raise DataError(
                f"{location}: the file is missing. Restore it, or run `mindvl data index {self._directory}`."
            ) from error
        except OSError as error:
            raise DataError(
                f"{location}: the file cannot be read: {error.strerror}. Check the disk or its connection."
            ) from error
        except ValueError as error:  # an empty file cannot be mapped
            raise damaged from error
        arrays = index_arrays(content)
        if arrays is None or len(arrays[0]) != self.sizes[number]:
            raise damaged
        if is_new and not is_consistent(arrays, int(self._num_bytes[number])):
            raise damaged
        self._verified[number] = stamp
        return ShardIndex(
            name=name, path=join(self._directory, name), digest=digest, samples=arrays[0], members=arrays[1]
        )


@dataclass(frozen=True, kw_only=True)
class DirectoryIndex:
    """All shards of a directory, in name order."""

    directory: Location
    shards: Shards
    num_samples: int
    num_images: int
    num_videos: int
    identity: str  # sha256 over the digests of all index files, so over every key, size and content crc

    @property
    def is_text(self) -> bool:
        """Whether the directory has no images and no videos."""
        return self.num_images + self.num_videos == 0


def open_index(directory: Location, *, store: StoreConfig | None = None, max_mapped: int = 64) -> DirectoryIndex:
    """Read the manifest of a directory; index files are mapped later, one shard at a time.

    For a local directory, the names and sizes of all files are compared with the manifest. In an object store this
    would take one request per file: there, a file is checked on its first use, and shards that are not in the manifest
    are not detected.

    Args:
        directory: Path or address of the directory.
        store: Settings of the object store, for a directory that is an address.
        max_mapped: Number of index files that stay mapped.

    Raises:
        DataError: There is no index, it has another version, or files changed after indexing.
    """
    if isinstance(directory, str) and not is_remote(directory):
        directory = Path(directory)
    manifest = read_manifest(_on_disk(join(directory, MANIFEST_NAME), None, store), directory)
    if not is_remote(directory):
        check_files(Path(directory), manifest)
    entries = manifest.shards
    digest = hashlib.sha256("".join(entry["index_sha256"] for entry in entries).encode())
    shards = Shards(
        directory,
        [entry["name"] for entry in entries],
        np.array([entry["samples"] for entry in entries], np.int64),
        np.array([entry["bytes"] for entry in entries], np.int64),
        b"".join(bytes.fromhex(entry["index_sha256"]) for entry in entries),
        store=store,
        max_mapped=max_mapped,
    )
    return DirectoryIndex(
        directory=directory,
        shards=shards,
        num_samples=manifest.samples,
        num_images=manifest.images,
        num_videos=manifest.videos,
        identity=digest.hexdigest(),
    )


def _on_disk(location: Location, sha256: str | None, store: StoreConfig | None) -> Path:
    """The path of a local file, or of the local copy of an object."""
    return local_copy(location, sha256, store) if isinstance(location, str) else location
