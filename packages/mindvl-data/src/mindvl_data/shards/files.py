# SPDX-License-Identifier: Apache-2.0
"""Read byte ranges of shards from any thread, and count requests and bytes.

Comes after the index; all code that reads samples uses it.
"""

import os
import resource
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mindvl_data.config import StoreConfig
from mindvl_data.errors import DataError
from mindvl_data.process import OwnProcess
from mindvl_data.shards.cache import RangeCache
from mindvl_data.shards.location import Location, is_remote
from mindvl_data.shards.remote import RemoteStore

Range = tuple[int, int]  # (offset, length) in bytes
Content = bytes | memoryview  # a view into a larger read; copied only where it is stored

MAX_EXTRA_SHARE = 0.02  # bytes read between the requested ranges, as a share of the requested bytes
_REPORTED = ("bytes_wanted", "bytes_read", "requests", "retries", "cache_hits", "cache_bytes")


class ShardFiles:
    """Open shards that any thread can read at any offset; the least recently used file is closed at the limit.

    Args:
        store: Settings of object stores and of the local cache.
        max_open: Limit of open local files.
    """

    def __init__(self, store: StoreConfig | None = None, max_open: int = 256) -> None:
        self._process = OwnProcess("ShardFiles")
        self.store = store
        self._local = _LocalFiles(max_open)
        settings = store or StoreConfig()
        self._remote = RemoteStore(settings, self._count)
        self._cache = RangeCache(settings.cache, settings.cache_bytes) if settings.cache is not None else None
        self._counts: dict[str, int] = dict.fromkeys(_REPORTED, 0)
        self._lock = threading.Lock()

    def read(self, location: Location, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`.

        Raises:
            DataError: The bytes cannot be read.
        """
        return bytes(self.read_ranges(location, [(offset, length)])[0])

    def read_ranges(self, location: Location, ranges: Sequence[Range]) -> list[Content]:
        """The bytes of each range, in the given order; adjacent ranges are read together.

        Raises:
            DataError: The bytes cannot be read.
        """
        self._process.check()
        if isinstance(location, str) and is_remote(location):
            self._count("bytes_wanted", sum(length for _, length in ranges))
            return self._read_remote(location, ranges)
        # A new Path would have to compute its hash again.
        path = location if isinstance(location, Path) else Path(location)
        spans = coalesce(ranges)
        file = self._local.open(path)
        try:
            contents = [_read_fully(file.descriptor, path, start, end - start) for start, end in spans]
        finally:
            self._local.release(file)
        with self._lock:
            self._counts["requests"] += len(spans)
            self._counts["bytes_read"] += sum(map(len, contents))
            self._counts["bytes_wanted"] += sum(length for _, length in ranges)
        return cut(ranges, spans, contents)

    def read_again(self, location: Location, offset: int, length: int) -> bytes:
        """Read the range again from the disk or store, bypassing caches, because its bytes were wrong.

        Raises:
            DataError: The bytes cannot be read.
        """
        self._process.check()
        if isinstance(location, str) and is_remote(location):
            if self._cache is not None:
                self._cache.forget(location, offset, length)
            return bytes(self._read_remote(location, [(offset, length)])[0])
        path = Path(location)
        file = self._local.open(path)
        try:
            with suppress(OSError):  # not every file system can drop cached pages
                os.posix_fadvise(file.descriptor, offset, length, os.POSIX_FADV_DONTNEED)
            content = _read_fully(file.descriptor, path, offset, length)
        finally:
            self._local.release(file)
        with self._lock:
            self._counts["requests"] += 1
            self._counts["retries"] += 1
            self._counts["bytes_read"] += length
        return content

    def report(self) -> dict[str, int]:
        """The counters since this object was created.

        Returns:
            `bytes_wanted`: bytes requested by callers; `bytes_read`: bytes read from files and stores, including gaps
            between adjacent ranges; `requests`, including `retries`; `cache_hits` and the `cache_bytes` they returned.
        """
        self._process.check()
        with self._lock:
            return dict(self._counts)

    def close(self) -> None:
        """Close all files."""
        if self._process.is_current:  # those of a forked process are closed when it ends
            self._local.close()

    def _read_remote(self, address: str, ranges: Sequence[Range]) -> list[Content]:
        """Read from the cache where possible and from the store otherwise. Each range is cached separately, so that it
        is found again in any other combination of ranges."""
        known: dict[Range, Content] = {}
        if self._cache is not None:
            for each in dict.fromkeys(ranges):
                if (kept := self._cache.get(address, *each)) is not None:
                    known[each] = kept
            self._count("cache_hits", len(known))
            self._count("cache_bytes", sum(map(len, known.values())))
        missing = [each for each in dict.fromkeys(ranges) if each not in known]
        spans = coalesce(missing)
        contents = self._remote.read_many(address, spans)
        for each, content in zip(missing, cut(missing, spans, contents), strict=True):
            known[each] = content
            if self._cache is not None:
                self._cache.put(address, each[0], bytes(content))
        return [known[each] for each in ranges]

    def _count(self, name: str, amount: int) -> None:
        with self._lock:
            self._counts[name] += amount


def coalesce(ranges: Sequence[Range]) -> list[tuple[int, int]]:
    """The sorted, disjoint spans (start, end) to read so that all ranges are covered.

    Gaps are bridged in order of size while their sum is at most MAX_EXTRA_SHARE of the requested bytes: adjacent
    members of a tar, a few hundred bytes of padding apart, become one read; distant ones do not.
    """
    if len(ranges) == 1:
        ((offset, length),) = ranges
        return [(offset, offset + length)]
    spans: list[tuple[int, int]] = []
    for start, end in sorted((offset, offset + length) for offset, length in ranges):
        if spans and start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
        else:
            spans.append((start, end))
    budget = int(MAX_EXTRA_SHARE * sum(end - start for start, end in spans))
    bridged = set()
    for gap, number in sorted((spans[i][0] - spans[i - 1][1], i) for i in range(1, len(spans))):
        budget -= gap
        if budget < 0:
            break
        bridged.add(number)
    joined: list[tuple[int, int]] = []
    for number, (start, end) in enumerate(spans):
        if number in bridged:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined


def cut(ranges: Sequence[Range], spans: Sequence[tuple[int, int]], contents: Sequence[bytes]) -> list[Content]:
    """The bytes of each range, as views into the spans that cover them."""
    if len(ranges) == 1:
        return list(contents)
    starts = [start for start, _ in spans]
    views = [memoryview(content) for content in contents]
    pieces: list[Content] = []
    for offset, length in ranges:
        number = bisect_right(starts, offset) - 1
        skip = offset - starts[number]
        pieces.append(views[number][skip : skip + length])
    return pieces


@dataclass
class _OpenFile:
    descriptor: int
    users: int = 0  # threads that are reading from it
    is_listed: bool = True  # False if its last user has to close it


class _LocalFiles:
    """Open descriptors by path. Reads hold no lock: a file that is evicted while in use is closed by its last user."""

    def __init__(self, max_open: int) -> None:
        # One eighth of the process limit, so that several loaders and their mapped index files fit.
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._max_open = max_open if limit == resource.RLIM_INFINITY else max(1, min(max_open, limit // 8))
        self._files: OrderedDict[Path, _OpenFile] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, path: Path) -> _OpenFile:
        """The open file; its descriptor stays open until `release`."""
        with self._lock:
            file = self._files.get(path)
            if file is not None:
                self._files.move_to_end(path)
                file.users += 1
                return file
        opened = _OpenFile(_open(path))  # without the lock: slow on a network file system
        with self._lock:
            file = self._files.setdefault(path, opened)
            if file is not opened:  # another thread opened it first
                os.close(opened.descriptor)
            file.users += 1
            while len(self._files) > self._max_open:
                self._unlist(self._files.popitem(last=False)[1])
            return file

    def release(self, file: _OpenFile) -> None:
        with self._lock:
            file.users -= 1
            if not file.users and not file.is_listed:
                os.close(file.descriptor)

    def close(self) -> None:
        with self._lock:
            while self._files:
                self._unlist(self._files.popitem()[1])

    def _unlist(self, file: _OpenFile) -> None:
        file.is_listed = False
        if not file.users:
            os.close(file.descriptor)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise DataError(f"{path}: the shard cannot be opened: {error.strerror}. Restore it.") from error


def _read_fully(descriptor: int, path: Path, offset: int, length: int) -> bytes:
    """Read `length` bytes. One pread may return fewer (2 GB at most, and less on some network file systems)."""
    pieces, have = [], 0
    while have < length:
        try:
            piece = os.pread(descriptor, length - have, offset + have)
        except OSError as error:
            raise DataError(
                f"{path} at byte {offset}: the shard cannot be read: {error.strerror}. Check the disk or its connection."
            ) from error
        if not piece:
            raise DataError(
                f"{path} at byte {offset}: expected {length} bytes, got {have}; the shard changed after it was indexed. "
                "Run `mindvl data index` again."
            )
        pieces.append(piece)
        have += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
