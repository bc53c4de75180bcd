# SPDX-License-Identifier: Apache-2.0
"""A cache on a local disk for byte ranges of objects in a store; several processes may share one directory.

Used by files.py in front of remote.py. One file holds one range: the blake2b of its bytes (16 bytes), then the bytes.
A file with a wrong checksum is discarded and fetched again, so writes need not be flushed to disk. The least recently
used files are evicted first; the file `bytes` holds the sum of all sizes (8 bytes, little-endian), which every process
updates under a file lock.
"""

import fcntl
import hashlib
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mindvl_data.errors import DataError

logger = logging.getLogger(__name__)

CHECKSUM_BYTES = 16
KEPT_SHARE = 0.9  # share of max_bytes left after an eviction, so that the next range does not cause another one


class RangeCache:
    """Cached bytes by (address, offset, length), up to a total size.

    Args:
        directory: Cache directory on a local disk; created if it is missing.
        max_bytes: Limit for all ranges together. Index files of shards are stored separately and not counted.

    Raises:
        DataError: The directory cannot be created.
    """

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self._directory, self._max_bytes = directory / "ranges", max_bytes
        self._lock = threading.Lock()
        self._is_disabled = False
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(
                f"{directory}: the cache directory cannot be created: {error.strerror}. Correct store.cache."
            ) from error

    def get(self, address: str, offset: int, length: int) -> bytes | None:
        """The cached bytes, or None if the range is absent or damaged."""
        path = self._path(address, offset, length)
        try:
            stored = path.read_bytes()
        except OSError:
            return None
        content = stored[CHECKSUM_BYTES:]
        if len(content) != length or _checksum(content) != stored[:CHECKSUM_BYTES]:
            logger.warning(
                "%s: the checksum of a cached range is wrong. The range is discarded and fetched again.", path
            )
            self.forget(address, offset, length)
            return None
        with suppress(OSError):  # another process may have evicted it
            os.utime(path)  # mark it as the most recently used
        return content

    def put(self, address: str, offset: int, content: bytes) -> None:
        """Store a range. If the disk is full or fails, a warning is logged and the cache stores nothing more."""
        size = CHECKSUM_BYTES + len(content)
        if self._is_disabled or size > self._max_bytes:
            return
        path = self._path(address, offset, len(content))
        partial = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(_checksum(content) + content)
            is_new = not path.exists()
            os.replace(partial, path)
            if is_new:
                self._grow(size)
        except FileNotFoundError:  # evicted by another process, or the directory was removed
            return
        except OSError as error:
            self._is_disabled = True
            logger.warning(
                "%s: the cache cannot be written: %s. Nothing more is cached.", self._directory, error.strerror
            )
            with suppress(OSError):
                partial.unlink()

    def forget(self, address: str, offset: int, length: int) -> None:
        """Remove a range whose bytes are wrong."""
        path = self._path(address, offset, length)
        with suppress(OSError):
            size = path.stat().st_size
            path.unlink()
            self._grow(-size)

    def _path(self, address: str, offset: int, length: int) -> Path:
        name = hashlib.sha256(f"{address}\0{offset}\0{length}".encode()).hexdigest()[:40]
        return self._directory / name[:2] / name[2:]

    def _grow(self, size: int) -> None:
        with self._total() as counter:
            stored = os.pread(counter, 8, 0)
            total = int.from_bytes(stored, "little") + size if len(stored) == 8 else self._evict(None)
            if not 0 <= total <= self._max_bytes:
                total = self._evict(int(KEPT_SHARE * self._max_bytes))
            os.pwrite(counter, total.to_bytes(8, "little"), 0)

    @contextmanager
    def _total(self) -> Iterator[int]:
        """The descriptor of the file with the sum of all sizes, locked against other threads and processes."""
        with self._lock:
            counter = os.open(self._directory / "bytes", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(counter, fcntl.LOCK_EX)
                yield counter
            finally:
                os.close(counter)

    def _evict(self, target: int | None) -> int:
        """Remove the least recently used ranges until `target` bytes are left (None: remove nothing); return the sum."""
        found = []
        for directory in os.scandir(self._directory):
            if directory.is_dir():
                for file in os.scandir(directory.path):
                    with suppress(FileNotFoundError):
                        status = file.stat()
                        found.append((status.st_mtime_ns, file.path, status.st_size))
        total = sum(size for _, _, size in found)
        for _, path, size in sorted(found):
            if target is None or total <= target:
                break
            with suppress(FileNotFoundError):
                os.unlink(path)
            total -= size
        return total


def _checksum(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=CHECKSUM_BYTES).digest()
