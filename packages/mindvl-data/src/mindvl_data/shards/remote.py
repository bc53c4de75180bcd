# SPDX-License-Identifier: Apache-2.0
"""Read byte ranges of objects in a store through fsspec, with a bounded number of retries.

Comes before files.py (ranges of shards) and index.py (manifest and index files, which are copied to the local cache).
fsspec runs all requests in a thread of its own, so any thread may call; a forked process opens new connections.
"""

import errno
import hashlib
import json
import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mindvl_data.config import StoreConfig
from mindvl_data.errors import DataError, redact
from mindvl_data.shards.atomic import write_atomically
from mindvl_data.shards.location import Location, cache_directory, is_remote, name_of, sidecar_path

logger = logging.getLogger(__name__)

PART_BYTES = 1 << 24  # bytes per request at most, so that a slow connection stays within the timeout
MAX_CONCURRENT_REQUESTS = 16  # per call
INITIAL_BACKOFF_S, MAX_BACKOFF_S = 0.2, 20.0

Count = Callable[[str, int], None]  # (name of the counter, increment)

_EXTRAS = {"s3": "s3", "s3a": "s3", "http": "http", "https": "http"}
# Matched by class name: aiohttp and botocore are optional, and importing them for their errors takes half a second.
_TRANSIENT = {
    *("ClientConnectionError", "ClientPayloadError"),  # aiohttp
    *("ConnectionError", "HTTPClientError", "IncompleteReadError"),  # botocore; the last is also an asyncio error
}
_FINAL_ERRNOS = {errno.EINVAL, errno.EPERM, errno.ENOSYS, errno.ENAMETOOLONG, getattr(errno, "EREMCHG", errno.ENOENT)}
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/")

_jitter = random.SystemRandom()  # independent of the generators that training seeds
_lock = threading.Lock()
_connections: dict[tuple[int, str, str], Any] = {}  # fsspec file systems by process, protocol and options
_absent: set[Path] = set()  # local paths of objects that the store does not have
_verified: dict[Path, tuple[int, int, int]] = {}  # index files whose sha256 was checked: inode, size, mtime


def _reset_lock() -> None:
    """Replace the lock in a forked process, where the thread that held it does not exist."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_reset_lock)


class _UnavailableError(DataError):
    """The object does not exist, or access to it is denied."""


class RemoteStore:
    """Reads ranges of objects.

    Args:
        store: Timeout, retries and fsspec options.
        count: Called with every request, retry and number of bytes read.
    """

    def __init__(self, store: StoreConfig, count: Count) -> None:
        self._store, self._count = store, count

    def read(self, address: str, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`.

        Raises:
            DataError: The store refuses the request, every attempt failed, or the object is too short.
        """
        return self.read_many(address, [(offset, offset + length)])[0]

    def read_many(self, address: str, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """The bytes of each span (start, end), in the given order, with concurrent requests.

        Raises:
            DataError: As `read`.
        """
        parts = [(s, min(s + PART_BYTES, end)) for start, end in spans for s in range(start, end, PART_BYTES)]

        def fetch(part: tuple[int, int]) -> bytes:
            return self._request(address, part[0], part[1] - part[0], exact=True)

        if len(parts) <= 1:
            contents = iter([fetch(part) for part in parts])
        else:  # the pool is created per call, so that it does not break in a forked process
            pool = ThreadPoolExecutor(min(len(parts), MAX_CONCURRENT_REQUESTS))
            try:
                contents = iter(list(pool.map(fetch, parts)))
            finally:
                pool.shutdown(cancel_futures=True)
        return [b"".join(next(contents) for _ in range(start, end, PART_BYTES)) for start, end in spans]

    def read_whole(self, address: str) -> bytes:
        """All bytes of an object, read in parts."""
        parts = [self._request(address, 0, PART_BYTES, exact=False)]
        while len(parts[-1]) == PART_BYTES:
            parts.append(self._request(address, len(parts) * PART_BYTES, PART_BYTES, exact=False))
        return b"".join(parts)

    def _request(self, address: str, offset: int, length: int, *, exact: bool) -> bytes:
        for attempt in range(self._store.retries + 1):
            if attempt:
                self._count("retries", 1)
                time.sleep(min(INITIAL_BACKOFF_S * 2 ** (attempt - 1), MAX_BACKOFF_S) * _jitter.uniform(0.5, 1.0))
            self._count("requests", 1)
            try:
                content = _fetch(_connect(address, self._store), address, offset, length, self._store.timeout_s)
            except DataError:
                raise
            except Exception as error:  # any library below fsspec may raise its own errors
                if not _is_transient(error):
                    raise _permanent_error(error, address) from error
                problem = f"{attempt + 1} attempts to read from the store failed: {_describe(error)}"
                action = "Check the network and the store, then start again; the run resumes from its last checkpoint."
                cause: Exception | None = error
            else:
                self._count("bytes_read", len(content))
                if len(content) == length or not exact:
                    return content
                problem = f"expected {length} bytes, got {len(content)}; the shard changed after it was indexed"
                action = "Index the directory and upload it again."
                cause = None
            logger.warning("%s at byte %d: %s.", redact(address), offset, redact(problem))
        raise DataError(f"{address} at byte {offset}: {problem}. {action}") from cause


def local_copy(address: str, sha256: str | None, store: StoreConfig | None) -> Path:
    """The path of a local copy of a manifest or index file.

    Args:
        address: Address of the object.
        sha256: Expected checksum; a local copy that has it is used without a request. None: the object is always
            fetched, so that an index that was replaced is not used.
        store: Settings of the object store.

    Raises:
        DataError: The object cannot be fetched, or its checksum is not the one in the manifest.
    """
    name = name_of(address)
    path = cache_directory(address.rsplit("/", 1)[0], store) / (f"{sha256[:16]}-{name}" if sha256 else name)
    assert store is not None  # otherwise cache_directory raises
    if sha256 is not None and _is_intact(path, sha256):
        return path
    content = RemoteStore(store, lambda what, amount: None).read_whole(address)
    if sha256 is not None and hashlib.sha256(content).hexdigest() != sha256:
        raise DataError(
            f"{address}: the sha256 of the index file differs from the one in the manifest. Upload the directory again, "
            "the manifest last."
        )
    _save_copy(path, content)
    return path


def fetch_sidecar(shard: Location, name: str, store: StoreConfig | None) -> Path:
    """The path of a sidecar file of a shard, as `location.sidecar_path`.

    For a shard in an object store, the file is first fetched from the directory of the shard if it exists there.
    """
    path = sidecar_path(shard, name, store)
    if not isinstance(shard, str) or not is_remote(shard) or path in _absent or path.exists():
        return path
    assert store is not None  # otherwise sidecar_path raises
    try:
        content = RemoteStore(store, lambda what, amount: None).read_whole(f"{shard.rsplit('/', 1)[0]}/{name}")
        _save_copy(path, content)
    except _UnavailableError:
        _absent.add(path)  # one request per process
    return path


def _save_copy(path: Path, content: bytes) -> None:
    try:
        write_atomically(path, content)
    except OSError as error:
        raise DataError(
            f"{path}: the cache cannot be written: {error.strerror}. Free disk space or correct store.cache."
        ) from error


def _is_intact(path: Path, sha256: str) -> bool:
    try:
        status = path.stat()
        stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
        if _verified.get(path) != stamp:
            with open(path, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                    logger.warning("%s: the checksum of a cached index file is wrong. It is fetched again.", path)
                    return False
            _verified[path] = stamp
    except OSError:
        return False
    return True


def _connect(address: str, store: StoreConfig) -> Any:
    """The fsspec file system for an address; one per process, protocol and options.

    Raises:
        DataError: The protocol is unknown, its library is not installed, or an option is not valid for it.
    """
    import fsspec

    protocol = address.split("://", 1)[0]
    options: dict[str, Any] = dict(store.options.get(protocol, {}))
    if _EXTRAS.get(protocol) == "s3":  # RemoteStore retries and counts the retries
        limits = {"connect_timeout": store.timeout_s, "read_timeout": store.timeout_s, "retries": {"max_attempts": 0}}
        options["config_kwargs"] = limits | {"max_pool_connections": 64} | options.get("config_kwargs", {})
    key = (os.getpid(), protocol, json.dumps(options, sort_keys=True, default=str))
    with _lock:
        if key not in _connections:
            try:
                system = fsspec.filesystem(protocol, skip_instance_cache=True, use_listings_cache=False, **options)
            except ImportError as error:
                extra = f"mindvl-data[{_EXTRAS[protocol]}]" if protocol in _EXTRAS else str(error)
                raise DataError(
                    f"{address}: the library for {protocol}:// is not installed. Install {extra}."
                ) from error
            except (TypeError, ValueError, KeyError) as error:
                raise DataError(
                    f"{address}: {protocol}:// cannot be opened: {_describe(error)}. Correct the address or "
                    f"store.options.{protocol}."
                ) from error
            if _EXTRAS.get(protocol) == "s3":
                system.retries = 1  # number of attempts in s3fs
            _connections[key] = system
        return _connections[key]


def _fetch(system: Any, address: str, offset: int, length: int, timeout_s: float) -> bytes:
    """Make one request; returns fewer bytes at the end of the object. fsspec's timeout cancels the request."""
    if not getattr(system, "async_impl", False):
        return bytes(system.cat_file(address, start=offset, end=offset + length))
    from fsspec.asyn import sync

    if address.startswith(("http://", "https://")):
        return bytes(sync(system.loop, _get, system, address, offset, length, timeout=timeout_s))
    try:
        return bytes(sync(system.loop, system._cat_file, address, start=offset, end=offset + length, timeout=timeout_s))
    except OSError as error:
        if "InvalidRange" in str(error.__cause__):  # the range begins at or after the end of the object
            return b""
        raise


async def _get(system: Any, address: str, offset: int, length: int) -> bytes:
    """A range request over http that checks the response; fsspec's accepts any response, even the whole file."""
    session = await system.set_session()
    headers = system.kwargs.get("headers", {}) | {
        "Range": f"bytes={offset}-{offset + length - 1}",
        "Accept-Encoding": "identity",  # a range of a compressed stream cannot be decoded
    }
    async with session.get(system.encode_url(address), **(system.kwargs | {"headers": headers})) as response:
        if response.status == 416:  # the range begins at or after the end of the object
            return b""
        response.raise_for_status()
        if response.status != 206:
            raise DataError(
                f"{address}: the server answers a range request with status {response.status}, not 206. "
                "Use a server that supports range requests."
            )
        found = _CONTENT_RANGE.match(response.headers.get("Content-Range", ""))
        if found is None or int(found[1]) != offset or not offset <= int(found[2]) < offset + length:
            raise ConnectionError(
                f"Content-Range: must begin at byte {offset} and have at most {length} bytes, "
                f"got {response.headers.get('Content-Range')!r}"
            )
        return bytes(await response.content.readexactly(int(found[2]) - offset + 1))


def _is_transient(error: Exception) -> bool:
    status = getattr(error, "status", None)
    if isinstance(status, int):
        return status >= 500 or status in (408, 425, 429)
    if isinstance(error, OSError):
        is_final = isinstance(error, FileNotFoundError | PermissionError) or error.errno in _FINAL_ERRNOS
        return not is_final
    return bool(_TRANSIENT & {cls.__name__ for cls in type(error).__mro__})


def _permanent_error(error: Exception, address: str) -> DataError:
    """The error for a failure that a retry cannot fix."""
    status = getattr(error, "status", None)
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return _UnavailableError(
            f"{address}: the object does not exist. Correct the address, or upload the directory with its manifest.json "
            "and its index files."
        )
    if isinstance(error, PermissionError) or status in (401, 403) or "Credential" in type(error).__name__:
        protocol = address.split("://", 1)[0]
        return _UnavailableError(
            f"{address}: the store denies access: {_describe(error)}. Check store.options.{protocol} or the credentials "
            "of this machine; some stores also answer this way when an object is missing."
        )
    return DataError(
        f"{address}: the store rejects the request: {_describe(error)}. Check the address and store.options."
    )


def _describe(error: Exception) -> str:
    return f"{type(error).__name__} {error}".strip().rstrip(".")
