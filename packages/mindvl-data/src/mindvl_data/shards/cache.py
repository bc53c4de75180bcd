# SPDX-License-Identifier: Apache-2.0
"""Ranges fetched from an object store, kept on a local disk; several processes may share one directory.

Stands between files.py and remote.py. One file holds one range: the blake2b of its bytes (16 bytes), then the bytes.
A file whose checksum is wrong is thrown away, so nothing is flushed to disk and a crash costs no more than a fetch.
The least recently used files go first; the file `bytes` holds the sum of all sizes (8 bytes, little-endian), changed
under its lock by every process alike.
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
KEPT_SHARE = 0.9  # of the limit, after making room; so room is not made again at the next range


class RangeCache:
    """Bytes by (address, offset, length), within a limit.

    Args:
        directory: On a local disk; made if it is missing.
        max_bytes: Limit of all ranges together. Index files of shards are kept apart and not counted.

    Raises:
        DataError: The directory cannot be made.
    """

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self._directory, self._max_bytes = directory / "ranges", max_bytes
        self._lock = threading.Lock()
        self._is_full = False
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"the cache cannot be made: {error.strerror}. {directory}. Mend store.cache.") from error

    def get(self, address: str, offset: int, length: int) -> bytes | None:
        """The bytes, or None where they are not kept whole."""
        path = self._path(address, offset, length)
        try:
            stored = path.read_bytes()
        except OSError:
            return None
        content = stored[CHECKSUM_BYTES:]
        if len(content) != length or _checksum(content) != stored[:CHECKSUM_BYTES]:
            logger.warning("a damaged range is thrown away and fetched again: %s", path)
            self.forget(address, offset, length)
            return None
        with suppress(OSError):  # another process may have made room meanwhile
            os.utime(path)  # now the most recently used
        return content

    def put(self, address: str, offset: int, content: bytes) -> None:
        """Keep a range; a disk that is full or broken is no reason to stop: then nothing more is kept."""
        size = CHECKSUM_BYTES + len(content)
        if self._is_full or size > self._max_bytes:
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
        except FileNotFoundError:  # another process made room, or somebody removed the directory
            return
        except OSError as error:
            self._is_full = True
            logger.warning("nothing more is kept in the cache %s: %s", self._directory, error.strerror)
            with suppress(OSError):
                partial.unlink()

    def forget(self, address: str, offset: int, length: int) -> None:
        """Throw a range away, because its bytes are wrong."""
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
            total = int.from_bytes(stored, "little") + size if len(stored) == 8 else self._make_room(None)
            if not 0 <= total <= self._max_bytes:
                total = self._make_room(int(KEPT_SHARE * self._max_bytes))
            os.pwrite(counter, total.to_bytes(8, "little"), 0)

    @contextmanager
    def _total(self) -> Iterator[int]:
        """The file with the sum of all sizes, locked against other threads and processes."""
        with self._lock:
            counter = os.open(self._directory / "bytes", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(counter, fcntl.LOCK_EX)
                yield counter
            finally:
                os.close(counter)

    def _make_room(self, target: int | None) -> int:
        """Remove the least recently used ranges until `target` bytes are left (None: all stay); returns the sum."""
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
