# SPDX-License-Identifier: Apache-2.0
"""Where a shard lies: a path of this machine, or the address of an object such as s3://bucket/photos/0.tar.

Comes before everything that opens shards. An address is a string with `://` in it; a path is a Path.
"""

import hashlib
from pathlib import Path

from mindvl_data.config import StoreConfig
from mindvl_data.errors import DataError, redact

Location = Path | str


def is_remote(location: Location) -> bool:
    """Whether this is an address, so read through fsspec and never as a file."""
    return isinstance(location, str) and "://" in location


def join(directory: Location, name: str) -> Location:
    """The location of `name` inside a directory."""
    if isinstance(directory, str) and is_remote(directory):
        return f"{directory.rstrip('/')}/{name}"
    return Path(directory) / name


def shown(location: Location) -> str:
    """The location for a log: without the secrets of an address. Errors hide them by themselves."""
    return redact(str(location))


def name_of(location: Location) -> str:
    """The last part: the file name of a shard."""
    return location.rstrip("/").rsplit("/", 1)[-1] if isinstance(location, str) else location.name


def beside(shard: Location, name: str, store: StoreConfig | None) -> Path:
    """The path of a file of ours that belongs to a shard: next to it, or in the cache for a shard in an object store.

    Raises:
        DataError: The shard lies in an object store and no cache directory is configured.
    """
    if not isinstance(shard, str) or not is_remote(shard):
        return Path(shard).with_name(name)
    return kept_directory(shard.rsplit("/", 1)[0], store) / name


def kept_directory(address: str, store: StoreConfig | None) -> Path:
    """The directory of the cache that keeps whole files of one remote directory; made if it is missing.

    Raises:
        DataError: No cache directory is configured, or it cannot be made.
    """
    if store is None or store.cache is None:
        raise DataError(
            f"a source in an object store needs a directory on this machine for its index. {address}. "
            "Set store.cache to a directory on a local disk."
        )
    directory = store.cache / "files" / hashlib.sha256(address.rstrip("/").encode()).hexdigest()[:24]
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"the cache cannot be written: {error.strerror}. {directory}. Mend store.cache.") from error
    return directory
