# SPDX-License-Identifier: Apache-2.0
"""Read untrusted files of a model directory: names, symbolic links and JSON are checked before use.

Comes before headers.py and directory.py read tensors, and before configurations and tokenizers are compared.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .errors import DirectoryError

MAX_JSON_BYTES = 25_000_000  # parsed, the densest JSON of this size stays below 1 GB
MAX_JSON_DEPTH = 50

_MAX_NAME_BYTES = 255


def is_plain_name(name: object) -> bool:
    """Whether this is a plain file name: no separator, no `..`, no control characters."""
    return (
        isinstance(name, str)
        and name.isprintable()
        and name not in ("", ".", "..")
        and not {"/", "\\"} & set(name)
        and len(name.encode()) <= _MAX_NAME_BYTES
    )


def regular_file(directory: Path, name: str) -> Path:
    """The path of a file that lies in the directory.

    Raises:
        DirectoryError: It is missing, is no regular file, or is a symbolic link that leaves the directory.
    """
    path = directory / name
    if not path.exists():
        raise DirectoryError(f"{path}: the file is missing. Copy the model directory again.")
    if not path.is_file():
        raise DirectoryError(f"{path}: is not a regular file. Copy the model directory again.")
    _refuse_escape(directory, path)
    return path


def other_files(directory: Path, is_ignored: Callable[[Path], bool]) -> Iterator[Path]:
    """Paths, relative to the directory, of all its files but the ignored ones, in a fixed order.

    Args:
        is_ignored: Predicate of relative paths of files and directories; an ignored directory is not entered.

    Raises:
        DirectoryError: One is no regular file, or is a symbolic link that leaves the directory.
    """
    for parent, directories, names in os.walk(directory):
        here = Path(parent).relative_to(directory)
        directories[:] = sorted(name for name in directories if not is_ignored(here / name))
        for name in directories:
            if (Path(parent) / name).is_symlink():
                raise DirectoryError(
                    f"{Path(parent) / name}: this directory is a symbolic link. Replace it with a copy."
                )
        for name in sorted(names):
            if not is_ignored(here / name):
                yield regular_file(directory, str(here / name)).relative_to(directory)


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
        DirectoryError: It cannot be read, is too large, or is not one JSON object without repeated keys.
    """
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise DirectoryError(
                f"{path}: has {size} bytes, the limit is {MAX_JSON_BYTES}. Check the source of the file."
            )
        content = path.read_bytes()
    except OSError as error:
        raise DirectoryError(f"{path}: cannot be read ({error.strerror}). Copy the file again.") from error
    return parse_json(content, path)


def parse_json(content: bytes, path: Path) -> dict[str, Any]:
    """The object in bytes that were read from `path`; the caller limits their size."""
    try:
        document = json.loads(content.decode(), object_pairs_hook=_without_repeated_keys)
        _refuse_depth(document)
    except (ValueError, RecursionError) as error:  # also other encodings than UTF-8, and integers of 5,000 digits
        raise DirectoryError(f"{path}: the JSON is damaged ({str(error)[:200]}). Copy the file again.") from error
    if not isinstance(document, dict):
        raise DirectoryError(f"{path}: the JSON must be an object, got {document!r:.60}. Copy the file again.")
    return document


def same_bytes(first: Path, other: Path) -> bool:
    """Whether two files exist and have equal content."""
    try:
        if first.stat().st_size != other.stat().st_size:
            return False
        with open(first, "rb") as left, open(other, "rb") as right:
            while True:
                one, two = left.read(1 << 16), right.read(1 << 16)
                if one != two:
                    return False
                if not one:
                    return True
    except OSError:
        return False


def real_path(path: Path) -> Path:
    """The path behind all symbolic links; those that lead in a circle are left as they are, to fail when opened."""
    return Path(os.path.realpath(path))


def _refuse_escape(directory: Path, path: Path) -> None:
    """Links inside of the directory are fine, and those into the Hugging Face cache, models--X/blobs/HASH.

    The cache has them from snapshots/COMMIT, and older `huggingface-cli download --local-dir` made them anywhere.
    """
    root, target = real_path(directory), real_path(path)
    allowed = [root, *([real_path(root.parent.parent / "blobs")] if root.parent.name == "snapshots" else [])]
    in_cache = target.parent.name == "blobs" and target.parent.parent.name.startswith("models--")
    if not in_cache and not any(target.is_relative_to(place) for place in allowed):
        raise DirectoryError(f"{path}: the symbolic link leaves the directory, to {target}. Replace it with a copy.")


def _without_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        repeated = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"key {repeated!r:.80} is repeated")
    return found


def _refuse_depth(document: Any) -> None:
    level = [document]
    for _ in range(MAX_JSON_DEPTH):
        containers = [one for one in level if isinstance(one, dict | list)]
        if not containers:
            return
        level = [value for one in containers for value in (one.values() if isinstance(one, dict) else one)]
    raise ValueError(f"nested deeper than {MAX_JSON_DEPTH} levels")
