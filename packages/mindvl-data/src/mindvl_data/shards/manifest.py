# SPDX-License-Identifier: Apache-2.0
"""The manifest of a directory of shards: read without trust, and compared with the files that lie beside it.

Written by indexing.py, read before index.py maps any index file. A damaged manifest must neither drop samples nor
change their order, so every field is checked, the sums have to hold, and no shard may lie beside it unmentioned.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from mindvl_data.errors import DataError
from mindvl_data.shards.index_format import index_bytes, index_name, is_index, shard_name
from mindvl_data.shards.sealed import SealError, unseal

MANIFEST_NAME = "manifest.json"
MANIFEST_VERSION = 2
INDEXING_NAME = "indexing.jsonl"  # one line for each shard that is done, while a directory is being indexed

_MAX_BYTES = 1 << 28  # of a manifest; a shard takes about 400
_MOST = 1 << 62  # of any count or size, so that sums stay within 64 bits
_COUNTS = ("samples", "images", "videos", "bytes")
_NAMED = 3  # files that a refusal names; the others are counted


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What is known of a directory without opening an index file."""

    shards: list[dict[str, Any]]  # in name order: name, bytes, samples, images, videos, index_sha256, ...
    empty_shards: frozenset[str]  # names of shards without a usable sample
    rules: Any  # what shards were looked at with
    samples: int
    images: int
    videos: int


def read_manifest(path: Path, directory: Path | str) -> Manifest:
    """The checked content of a manifest.

    Args:
        path: The file, or a copy of it.
        directory: The directory or address it belongs to, for messages.

    Raises:
        DataError: It is missing, damaged, or of another version.
    """
    again = f"Run `mindvl data index {directory}` again."
    try:
        content = unseal(path, max_bytes=_MAX_BYTES, requires_checksum=False)  # older ones have none
        if content.get("version") != MANIFEST_VERSION:
            version = str(content.get("version"))[:40]
            raise DataError(f"{directory}: index version {version} instead of {MANIFEST_VERSION}. {again}")
        return _checked(content)
    except FileNotFoundError as error:
        if path.with_name(INDEXING_NAME).exists():
            raise DataError(f"{directory}: indexing has not ended. Run `mindvl data index {directory}`.") from error
        raise DataError(f"{directory}: no index. Run `mindvl data index {directory}`.") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}. Check its permissions.") from error
    except SealError as error:
        raise DataError(f"{directory}: {MANIFEST_NAME} is damaged: {error}. {again}") from error


def refuse_different_files(directory: Path, manifest: Manifest) -> None:
    """Compare names and sizes of all shards and index files with the manifest; one listing of the directory.

    Raises:
        DataError: A file is missing or has another size, or a shard or index file is not in the manifest.
    """
    again = f"Run `mindvl data index {directory}`"
    try:
        with os.scandir(directory) as listing:
            files = {file.name: file for file in listing if file.name.endswith((".tar", ".idx"))}
        for entry in manifest.shards:
            for name, size in ((entry["name"], entry["bytes"]), (index_name(entry["name"]), index_bytes(entry))):
                if name not in files:
                    raise DataError(
                        f"{directory / name}: is missing. Put it back, or run `mindvl data index {directory}`."
                    )
                if (found := files[name].stat().st_size) != size:
                    what = "shard changed since it was indexed" if name == entry["name"] else "index file is damaged"
                    raise DataError(f"{directory / name}: {what}: {found} bytes instead of {size}. {again} again.")
        known = {entry["name"] for entry in manifest.shards} | manifest.empty_shards
        new = sorted(name for name, file in files.items() if name.endswith(".tar") and name not in known)
        new = [name for name in new if not files[name].is_dir()]
        if new:
            raise DataError(
                f"{directory / new[0]}: shard is not in {MANIFEST_NAME}{_others(new)}, so its samples would never be "
                f"used. {again}, or move the shard to another directory."
            )
        orphans = sorted(name for name in files if name.endswith(".idx") and shard_name(name) not in known)
        orphans = [name for name in orphans if files[name].is_file() and is_index(directory / name)]
        if orphans:
            raise DataError(
                f"{directory / orphans[0]}: belongs to a shard that is neither here nor in {MANIFEST_NAME}"
                f"{_others(orphans)}. Put {shard_name(orphans[0])} back, then {again[0].lower()}{again[1:]}."
            )
    except OSError as error:
        raise DataError(
            f"{error.filename or directory}: cannot be read: {error.strerror}. Check the directory."
        ) from error


def check_entry(entry: Any) -> dict[str, Any]:
    """One shard of a manifest.

    Raises:
        SealError: A field is missing or of another kind.
    """
    if not isinstance(entry, dict):
        raise SealError(f"a shard is {type(entry).__name__} instead of an object")
    name, digest = entry.get("name"), entry.get("index_sha256")
    if not _is_shard_name(name):
        raise SealError(f"{str(name)[:80]!r} is no file name of a shard")
    if not isinstance(digest, str) or len(digest) != 64 or digest.strip("0123456789abcdef"):
        raise SealError(f"{name} has no index_sha256")
    for field in _COUNTS:
        _count(entry, field, str(name))
    return entry


def _checked(content: dict[str, Any]) -> Manifest:
    shards = content.get("shards")
    if not isinstance(shards, list) or not shards:
        raise SealError("it lists no shards")
    entries = [check_entry(entry) for entry in shards]
    names = [entry["name"] for entry in entries]
    if any(first >= second for first, second in pairwise(names)):
        raise SealError("its shards do not stand in the order of their names, each once")
    if any(not entry["samples"] for entry in entries):
        raise SealError("it lists a shard without a sample")
    for field in _COUNTS:
        total, listed = _count(content, field, "it"), sum(entry[field] for entry in entries)
        if total != listed:
            raise SealError(f"its shards hold {listed} {field}, but it says {total}: a shard was lost or changed")
    empty = content.get("empty_shards", [])
    if not isinstance(empty, list) or not all(_is_shard_name(name) for name in empty):
        raise SealError("`empty_shards` is no list of file names")
    counts = {field: content[field] for field in ("samples", "images", "videos")}
    return Manifest(shards=entries, empty_shards=frozenset(empty), rules=content.get("rules"), **counts)


def _count(content: dict[str, Any], field: str, what: str) -> int:
    value = content.get(field)
    if type(value) is not int or not 0 <= value < _MOST:
        raise SealError(f"{what} has {str(value)[:40]!r} as {field}, which is no count")
    return value


def _is_shard_name(name: Any) -> bool:
    return isinstance(name, str) and name.endswith(".tar") and "/" not in name and "\0" not in name


def _others(names: Sequence[str]) -> str:
    if len(names) == 1:
        return ""
    return f" ({len(names)} in all: {', '.join(names[:_NAMED])}{', ...' if len(names) > _NAMED else ''})"
