# SPDX-License-Identifier: Apache-2.0
"""The location of a shard: a local path, or the address of an object such as s3://bucket/photos/0.tar.

Comes before everything that opens shards. An address is a string that contains `://`; a path is a Path.
"""

import hashlib
from pathlib import Path

from mindvl_data.config import StoreConfig
from mindvl_data.errors import DataError, redact

Location = Path | str


def is_remote(location: Location) -> bool:
    """Whether this is an address, which is read through fsspec and not as a local file."""
    return isinstance(location, str) and "://" in location


def join(directory: Location, name: str) -> Location:
    """The location of `name` inside a directory."""
    if isinstance(directory, str) and is_remote(directory):
        return f"{directory.rstrip('/')}/{name}"
    return Path(directory) / name


def shown(location: Location) -> str:
    """The location for log lines, with the secrets of an address redacted. Errors redact their own messages."""
    return redact(str(location))


def name_of(location: Location) -> str:
    """The last component: the file name of a shard."""
    return location.rstrip("/").rsplit("/", 1)[-1] if isinstance(location, str) else location.name


def sidecar_path(shard: Location, name: str, store: StoreConfig | None) -> Path:
    """The path of a sidecar file of a shard: in its directory, or in the cache for a shard in an object store.

    Raises:
        DataError: The shard is in an object store and no cache directory is configured.
    """
    if not isinstance(shard, str) or not is_remote(shard):
        return Path(shard).with_name(name)
    return cache_directory(shard.rsplit("/", 1)[0], store) / name


def cache_directory(address: str, store: StoreConfig | None) -> Path:
    """The directory in the cache for whole files of one remote directory; it is created if it is missing.

    Raises:
        DataError: No cache directory is configured, or it cannot be created.
    """
    if store is None or store.cache is None:
        raise DataError(
            f"{address}: a source in an object store needs a local directory for its index, and store.cache is not set. "
            "Set store.cache to a directory on a local disk."
        )
    directory = store.cache / "files" / hashlib.sha256(address.rstrip("/").encode()).hexdigest()[:24]
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"{directory}: the cache directory cannot be created: {error.strerror}. Correct store.cache."
        ) from error
    return directory
