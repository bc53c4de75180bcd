# SPDX-License-Identifier: Apache-2.0
"""Open shards, read at any offset from any thread; counts every byte.

Comes after the index; everything that reads samples goes through it.
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
Content = bytes | memoryview  # a part of a larger read is not copied until somebody keeps it

MAX_EXTRA_SHARE = 0.02  # bytes read between wanted ranges, as a share of the bytes wanted
_REPORTED = ("bytes_wanted", "bytes_read", "requests", "retries", "cache_hits", "cache_bytes")


class ShardFiles:
    """Open shards, read at any offset from any thread; of too many, the least recently used one is closed."""

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
            DataError: They cannot be had.
        """
        return bytes(self.read_ranges(location, [(offset, length)])[0])

    def read_ranges(self, location: Location, ranges: Sequence[Range]) -> list[Content]:
        """The bytes of each range, in the order asked; neighbours are read together.

        Raises:
            DataError: They cannot be had.
        """
        self._process.check()
        if isinstance(location, str) and is_remote(location):
            self._count("bytes_wanted", sum(length for _, length in ranges))
            return self._read_remote(location, ranges)
        path = location if isinstance(location, Path) else Path(location)  # a copy would lose its kept hash
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
        """The range once more from where it is stored, whatever caches hold, because the bytes were wrong.

        Raises:
            DataError: They cannot be had.
        """
        self._process.check()
        if isinstance(location, str) and is_remote(location):
            if self._cache is not None:
                self._cache.forget(location, offset, length)
            return bytes(self._read_remote(location, [(offset, length)])[0])
        path = Path(location)
        file = self._local.open(path)
        try:
            with suppress(OSError):  # not every file system can drop pages; then the same ones may come again
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
        """What was read since the start of this process.

        Returns:
            `bytes_wanted` of the samples asked for; `bytes_read` from files and stores, what lies between neighbours
            included; `requests` made and `retries` among them; `cache_hits` and the `cache_bytes` they gave.
        """
        self._process.check()
        with self._lock:
            return dict(self._counts)

    def close(self) -> None:
        """Close all files."""
        if self._process.is_current:  # a fork's are closed when it ends
            self._local.close()

    def _read_remote(self, address: str, ranges: Sequence[Range]) -> list[Content]:
        """From the cache what it holds; the rest from the store, kept range by range, so that it is found again
        whatever else is asked for then."""
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
    """(start, end) of the reads that cover all ranges, sorted and apart.

    Gaps are bridged from the smallest on, as long as all of them together are at most MAX_EXTRA_SHARE of what is
    wanted: neighbours in a tar, a few hundred bytes of padding apart, become one read; strangers never do.
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
    for gap, place in sorted((spans[i][0] - spans[i - 1][1], i) for i in range(1, len(spans))):
        budget -= gap
        if budget < 0:
            break
        bridged.add(place)
    joined: list[tuple[int, int]] = []
    for place, (start, end) in enumerate(spans):
        if place in bridged:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined


def cut(ranges: Sequence[Range], spans: Sequence[tuple[int, int]], contents: Sequence[bytes]) -> list[Content]:
    """The bytes of each range out of the reads that cover them."""
    if len(ranges) == 1:
        return list(contents)
    starts = [start for start, _ in spans]
    views = [memoryview(content) for content in contents]
    pieces: list[Content] = []
    for offset, length in ranges:
        place = bisect_right(starts, offset) - 1
        skip = offset - starts[place]
        pieces.append(views[place][skip : skip + length])
    return pieces


@dataclass
class _OpenFile:
    descriptor: int
    users: int = 0  # threads that read from it now
    is_listed: bool = True  # False once it is to be closed by its last user


class _LocalFiles:
    """Descriptors by path. No lock is held while bytes are read: a file in use is closed by its last user."""

    def __init__(self, max_open: int) -> None:
        # an eighth: several loaders in a process, with the index files that each has mapped, stay below the limit
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._max_open = max_open if limit == resource.RLIM_INFINITY else max(1, min(max_open, limit // 8))
        self._files: OrderedDict[Path, _OpenFile] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, path: Path) -> _OpenFile:
        """The file with its descriptor, which stays open until `release`."""
        with self._lock:
            file = self._files.get(path)
            if file is not None:
                self._files.move_to_end(path)
                file.users += 1
                return file
        opened = _OpenFile(_open(path))  # without the lock: on a network file system this takes a while
        with self._lock:
            file = self._files.setdefault(path, opened)
            if file is not opened:  # another thread was faster
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
        raise DataError(f"shard cannot be opened: {error.strerror}. {path}. Put it back.") from error


def _read_fully(descriptor: int, path: Path, offset: int, length: int) -> bytes:
    """One pread can give less than asked (2 GB at most, and less on some network file systems)."""
    pieces, have = [], 0
    while have < length:
        try:
            piece = os.pread(descriptor, length - have, offset + have)
        except OSError as error:
            raise DataError(
                f"shard cannot be read: {error.strerror}. {path} at byte {offset}. Check the disk or its connection."
            ) from error
        if not piece:
            raise DataError(
                f"{length} bytes wanted, {have} are there. {path} at byte {offset}. "
                "The shard changed after it was indexed: run `mindvl data index` again."
            )
        pieces.append(piece)
        have += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
