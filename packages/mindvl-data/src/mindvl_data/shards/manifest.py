# SPDX-License-Identifier: Apache-2.0
"""The manifest of a directory of shards: validated when it is read, and compared with the files in the directory.

Written by indexing.py, read before index.py maps any index file. A damaged manifest must neither drop samples nor
change their order, so every field and every sum is checked, and a shard that it does not list is an error.
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
ORIGIN_NAME = "origin.json"  # id and revision of the data set that was written as shards; part of the manifest
INDEXING_NAME = "indexing.jsonl"  # while a directory is being indexed: one line per finished shard

_MAX_BYTES = 1 << 28  # size of a manifest; a shard takes about 400 bytes
_MAX_COUNT = 1 << 62  # for any count or size, so that sums fit into 64 bits
_COUNTS = ("samples", "images", "videos", "bytes")
_NUM_NAMED = 3  # file names in an error message; the others are only counted


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of a manifest."""

    shards: list[dict[str, Any]]  # in name order: name, bytes, samples, images, videos, index_sha256, ...
    empty_shards: frozenset[str]  # names of shards without a usable sample
    rules: Any  # validation rules, see validation.Rules
    samples: int
    images: int
    videos: int


def read_manifest(path: Path, directory: Path | str) -> Manifest:
    """Read and validate a manifest.

    Args:
        path: The manifest, or a local copy of it.
        directory: Path or address of the directory, for error messages.

    Raises:
        DataError: The manifest is missing, damaged, or of another version.
    """
    again = f"Run `mindvl data index {directory}` again."
    try:
        content = unseal(path, max_bytes=_MAX_BYTES, requires_checksum=False)  # older manifests have none
        if content.get("version") != MANIFEST_VERSION:
            version = str(content.get("version"))[:40]
            raise DataError(f"{directory}: the index has version {version}, expected {MANIFEST_VERSION}. {again}")
        return _checked(content)
    except FileNotFoundError as error:
        if path.with_name(INDEXING_NAME).exists():
            raise DataError(f"{directory}: indexing has not finished. Run `mindvl data index {directory}`.") from error
        raise DataError(f"{directory}: the directory has no index. Run `mindvl data index {directory}`.") from error
    except OSError as error:
        raise DataError(f"{path}: the file cannot be read: {error.strerror}. Check its permissions.") from error
    except SealError as error:
        raise DataError(f"{directory}: {MANIFEST_NAME} is invalid: {error}. {again}") from error


def check_files(directory: Path, manifest: Manifest) -> None:
    """Compare the names and sizes of all shards and index files with the manifest, from one directory listing.

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
                        f"{directory / name}: the file is missing. Restore it, or run `mindvl data index {directory}`."
                    )
                if (found := files[name].stat().st_size) != size:
                    what = (
                        "the shard changed since it was indexed"
                        if name == entry["name"]
                        else "the index file is damaged"
                    )
                    raise DataError(f"{directory / name}: {what}: expected {size} bytes, got {found}. {again} again.")
        known = {entry["name"] for entry in manifest.shards} | manifest.empty_shards
        new = sorted(name for name, file in files.items() if name.endswith(".tar") and name not in known)
        new = [name for name in new if not files[name].is_dir()]
        if new:
            raise DataError(
                f"{directory / new[0]}: the shard is not in {MANIFEST_NAME}{_others(new)}, so its samples would not be "
                f"used. {again}, or move the shard to another directory."
            )
        orphans = sorted(name for name in files if name.endswith(".idx") and shard_name(name) not in known)
        orphans = [name for name in orphans if files[name].is_file() and is_index(directory / name)]
        if orphans:
            raise DataError(
                f"{directory / orphans[0]}: the index file belongs to a shard that is neither in the directory nor in "
                f"{MANIFEST_NAME}{_others(orphans)}. Restore {shard_name(orphans[0])}, then {again[0].lower()}{again[1:]}."
            )
    except OSError as error:
        raise DataError(
            f"{error.filename or directory}: the directory cannot be read: {error.strerror}. Check its permissions."
        ) from error


def check_entry(entry: Any) -> dict[str, Any]:
    """Check the entry of one shard and return it.

    Raises:
        SealError: A field is missing or invalid.
    """
    if not isinstance(entry, dict):
        raise SealError(f"the entry of a shard must be an object, got {type(entry).__name__}")
    name, digest = entry.get("name"), entry.get("index_sha256")
    if not _is_shard_name(name):
        raise SealError(f"{str(name)[:80]!r} is not a file name of a shard")
    if not isinstance(digest, str) or len(digest) != 64 or digest.strip("0123456789abcdef"):
        raise SealError(f"{name} has no valid index_sha256")
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
        raise SealError("its shards are not unique and sorted by name")
    if any(not entry["samples"] for entry in entries):
        raise SealError("it lists a shard without samples")
    for field in _COUNTS:
        total, listed = _count(content, field, "the manifest"), sum(entry[field] for entry in entries)
        if total != listed:
            raise SealError(f"the {field} of its shards add up to {listed}, expected {total}")
    empty = content.get("empty_shards", [])
    if not isinstance(empty, list) or not all(_is_shard_name(name) for name in empty):
        raise SealError("`empty_shards` must be a list of file names")
    counts = {field: content[field] for field in ("samples", "images", "videos")}
    return Manifest(shards=entries, empty_shards=frozenset(empty), rules=content.get("rules"), **counts)


def _count(content: dict[str, Any], field: str, what: str) -> int:
    value = content.get(field)
    if type(value) is not int or not 0 <= value < _MAX_COUNT:
        raise SealError(f"{field} of {what} must be a count, got {str(value)[:40]!r}")
    return value


def _is_shard_name(name: Any) -> bool:
    return isinstance(name, str) and name.endswith(".tar") and "/" not in name and "\0" not in name


def _others(names: Sequence[str]) -> str:
    if len(names) == 1:
        return ""
    return f" ({len(names)} in all: {', '.join(names[:_NUM_NAMED])}{', ...' if len(names) > _NUM_NAMED else ''})"
