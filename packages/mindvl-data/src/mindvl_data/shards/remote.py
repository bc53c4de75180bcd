# SPDX-License-Identifier: Apache-2.0
"""Objects of a store, read by range through fsspec: bounded retries, clear refusals, no shard ever fetched whole.

Comes before files.py (ranges of shards) and index.py (manifest and index files, which are copied to this machine).
fsspec runs every request in one thread of its own, so any thread may call; a forked process connects anew.
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
from mindvl_data.shards.location import Location, beside, is_remote, kept_directory, name_of

logger = logging.getLogger(__name__)

PART_BYTES = 1 << 24  # of one request at most, so that a slow line gets through within the time limit
REQUESTS_AT_ONCE = 16  # of one call
FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 20.0

Count = Callable[[str, int], None]  # (what, how many)

_EXTRAS = {"s3": "s3", "s3a": "s3", "http": "http", "https": "http"}
# Told by name: aiohttp and botocore are extras, and importing them only to name their errors takes half a second.
_TRANSIENT = {
    *("ClientConnectionError", "ClientPayloadError"),  # aiohttp
    *("ConnectionError", "HTTPClientError", "IncompleteReadError"),  # botocore; the last of asyncio too
}
_FINAL_ERRNOS = {errno.EINVAL, errno.EPERM, errno.ENOSYS, errno.ENAMETOOLONG, getattr(errno, "EREMCHG", errno.ENOENT)}
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/")

_jitter = random.SystemRandom()  # apart from the generators that tests and training seed
_lock = threading.Lock()
_connections: dict[tuple[int, str, str], Any] = {}  # fsspec file systems by process, protocol and options
_absent: set[Path] = set()  # files that the store did not have when it was asked
_verified: dict[Path, tuple[int, int, int]] = {}  # index files whose sha256 this process has checked


def _new_lock() -> None:
    """In a forked process: a thread of the parent that held the lock does not exist there."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_new_lock)


class _RefusedError(DataError):
    """The object is not there, or may not be read."""


class RemoteStore:
    """Reads ranges of objects; `count` is told of every request, retry and byte."""

    def __init__(self, store: StoreConfig, count: Count) -> None:
        self._store, self._count = store, count

    def read(self, address: str, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`.

        Raises:
            DataError: The store refuses, or does not answer as often as was tried, or the object is too short.
        """
        return self.read_many(address, [(offset, offset + length)])[0]

    def read_many(self, address: str, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """The bytes of each (start, end), in the order asked; several requests are under way at once.

        Raises:
            DataError: As `read`.
        """
        parts = [(s, min(s + PART_BYTES, end)) for start, end in spans for s in range(start, end, PART_BYTES)]

        def fetch(part: tuple[int, int]) -> bytes:
            return self._request(address, part[0], part[1] - part[0], exact=True)

        if len(parts) <= 1:
            contents = iter([fetch(part) for part in parts])
        else:
            pool = ThreadPoolExecutor(min(len(parts), REQUESTS_AT_ONCE))  # made anew, so that a fork can do no harm
            try:
                contents = iter(list(pool.map(fetch, parts)))
            finally:
                pool.shutdown(cancel_futures=True)
        return [b"".join(next(contents) for _ in range(start, end, PART_BYTES)) for start, end in spans]

    def read_whole(self, address: str) -> bytes:
        """All bytes of an object, part by part."""
        parts = [self._request(address, 0, PART_BYTES, exact=False)]
        while len(parts[-1]) == PART_BYTES:
            parts.append(self._request(address, len(parts) * PART_BYTES, PART_BYTES, exact=False))
        return b"".join(parts)

    def _request(self, address: str, offset: int, length: int, *, exact: bool) -> bytes:
        for attempt in range(self._store.retries + 1):
            if attempt:
                self._count("retries", 1)
                time.sleep(min(FIRST_WAIT_S * 2 ** (attempt - 1), LONGEST_WAIT_S) * _jitter.uniform(0.5, 1.0))
            self._count("requests", 1)
            try:
                content = _fetch(_connect(address, self._store), address, offset, length, self._store.timeout_s)
            except DataError:
                raise
            except Exception as error:  # of any library below fsspec
                if not _is_transient(error):
                    raise _refusal(error, address) from error
                problem = f"the store failed {attempt + 1} times: {_text(error)}"
                action = "Check the network and the store, then start again: the run goes on where it stopped."
                cause: Exception | None = error
            else:
                self._count("bytes_read", len(content))
                if len(content) == length or not exact:
                    return content
                problem = f"{length} bytes wanted, {len(content)} are there"
                action = "The shard changed after it was indexed: index and upload it again."
                cause = None
            logger.warning("%s. %s at byte %d", redact(str(problem)), redact(address), offset)
        raise DataError(f"{problem}. {address} at byte {offset}. {action}") from cause


def local_copy(address: str, sha256: str | None, store: StoreConfig | None) -> Path:
    """A copy on this machine of a manifest or index file.

    Args:
        sha256: A copy with this checksum is used without asking the store. None: the object is fetched now, so that
            no plan is made from an index that has been replaced.

    Raises:
        DataError: It cannot be fetched, or is not the file that the manifest names.
    """
    name = name_of(address)
    path = kept_directory(address.rsplit("/", 1)[0], store) / (f"{sha256[:16]}-{name}" if sha256 else name)
    assert store is not None  # kept_directory refuses
    if sha256 is not None and _is_intact(path, sha256):
        return path
    content = RemoteStore(store, lambda what, amount: None).read_whole(address)
    if sha256 is not None and hashlib.sha256(content).hexdigest() != sha256:
        raise DataError(
            f"index file is not the one that the manifest names. {address}. Upload the directory again, the manifest last."
        )
    _keep(path, content)
    return path


def copy_beside(shard: Location, name: str, store: StoreConfig | None) -> Path:
    """The path of a file of ours that belongs to a shard, as `location.beside`.

    For a shard in an object store, a file of this name that was uploaded with it is fetched first, if there is one.
    """
    path = beside(shard, name, store)
    if not isinstance(shard, str) or not is_remote(shard) or path in _absent or path.exists():
        return path
    assert store is not None  # beside refuses
    try:
        content = RemoteStore(store, lambda what, amount: None).read_whole(f"{shard.rsplit('/', 1)[0]}/{name}")
        _keep(path, content)
    except _RefusedError:
        _absent.add(path)  # ask once in a process
    return path


def _keep(path: Path, content: bytes) -> None:
    try:
        write_atomically(path, content)
    except OSError as error:
        raise DataError(
            f"the cache cannot be written: {error.strerror}. {path}. Make room there or mend store.cache."
        ) from error


def _is_intact(path: Path, sha256: str) -> bool:
    try:
        status = path.stat()
        stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
        if _verified.get(path) != stamp:
            with open(path, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                    logger.warning("a damaged index file is thrown away and fetched again: %s", path)
                    return False
            _verified[path] = stamp
    except OSError:
        return False
    return True


def _connect(address: str, store: StoreConfig) -> Any:
    """The fsspec file system for an address; one for each protocol and process.

    Raises:
        DataError: The protocol is unknown, its library is not installed, or the options do not fit it.
    """
    import fsspec

    protocol = address.split("://", 1)[0]
    options: dict[str, Any] = dict(store.options.get(protocol, {}))
    if _EXTRAS.get(protocol) == "s3":  # we do the retrying, and count it
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
                    f"{protocol}:// needs a library that is missing. {address}. Install {extra}."
                ) from error
            except (TypeError, ValueError, KeyError) as error:
                raise DataError(
                    f"{protocol}:// cannot be opened: {_text(error)}. {address}. Mend the address or "
                    f"store.options.{protocol}."
                ) from error
            if _EXTRAS.get(protocol) == "s3":
                system.retries = 1  # attempts, in s3fs
            _connections[key] = system
        return _connections[key]


def _fetch(system: Any, address: str, offset: int, length: int, timeout_s: float) -> bytes:
    """One request; fewer bytes where the object ends. fsspec's own timeout cancels what is under way."""
    if not getattr(system, "async_impl", False):
        return bytes(system.cat_file(address, start=offset, end=offset + length))
    from fsspec.asyn import sync

    if address.startswith(("http://", "https://")):
        return bytes(sync(system.loop, _get, system, address, offset, length, timeout=timeout_s))
    try:
        return bytes(sync(system.loop, system._cat_file, address, start=offset, end=offset + length, timeout=timeout_s))
    except OSError as error:
        if "InvalidRange" in str(error.__cause__):  # from the end on
            return b""
        raise


async def _get(system: Any, address: str, offset: int, length: int) -> bytes:
    """fsspec's own range request over http takes whatever comes, even the whole file; this one looks at the answer."""
    session = await system.set_session()
    headers = system.kwargs.get("headers", {}) | {
        "Range": f"bytes={offset}-{offset + length - 1}",
        "Accept-Encoding": "identity",  # ranges of compressed bytes are of no use
    }
    async with session.get(system.encode_url(address), **(system.kwargs | {"headers": headers})) as response:
        if response.status == 416:  # from the end on
            return b""
        response.raise_for_status()
        if response.status != 206:
            raise DataError(
                f"the server answers a range request with status {response.status}, so with whole files. {address}. "
                "Use a server that knows ranges."
            )
        found = _CONTENT_RANGE.match(response.headers.get("Content-Range", ""))
        if found is None or int(found[1]) != offset or not offset <= int(found[2]) < offset + length:
            raise ConnectionError(f"another range came than was asked for ({response.headers.get('Content-Range')})")
        return bytes(await response.content.readexactly(int(found[2]) - offset + 1))


def _is_transient(error: Exception) -> bool:
    status = getattr(error, "status", None)
    if isinstance(status, int):
        return status >= 500 or status in (408, 425, 429)
    if isinstance(error, OSError):
        is_final = isinstance(error, FileNotFoundError | PermissionError) or error.errno in _FINAL_ERRNOS
        return not is_final
    return bool(_TRANSIENT & {cls.__name__ for cls in type(error).__mro__})


def _refusal(error: Exception, address: str) -> DataError:
    """What no retry can mend."""
    status = getattr(error, "status", None)
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return _RefusedError(
            f"there is no such object. {address}. Mend the address, or upload the directory with its manifest.json and "
            "its index files."
        )
    if isinstance(error, PermissionError) or status in (401, 403) or "Credential" in type(error).__name__:
        protocol = address.split("://", 1)[0]
        return _RefusedError(
            f"the store refuses access: {_text(error)}. {address}. Check store.options.{protocol} or the credentials "
            "of this machine; some stores answer so when an object is missing."
        )
    return DataError(f"the store refuses the request: {_text(error)}. {address}. Check the address and store.options.")


def _text(error: Exception) -> str:
    return f"{type(error).__name__} {error}".strip().rstrip(".")
