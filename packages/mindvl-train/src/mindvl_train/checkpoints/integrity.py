# SPDX-License-Identifier: Apache-2.0
"""Integrity of a checkpoint: sizes of all files and checksums of small files.

Written last, before the directory is renamed; compared before a checkpoint is used (directory.read_manifest). The large
files contain tensor chunks, each with a checksum that is compared on read (megatron/tensor_files.py).
"""

import json
import os
import zlib
from pathlib import Path
from typing import Any

FILES = "files.json"
_LARGE = ".distcp"
# Must be listed in files.json if they exist.
_READ = ("manifest.json", "ledger.json", "tensors/chunks.index", "tensors/.metadata")


def seal(directory: Path) -> None:
    """Write files.json and sync all files; tensor files were synced by their writers."""
    listed: dict[str, dict[str, int]] = {}
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        listed[path.relative_to(directory).as_posix()] = {"bytes": path.stat().st_size} | _checksum(path)
    (directory / FILES).write_text(json.dumps(listed, indent=1) + "\n")
    for path in [*directory.rglob("*"), directory]:
        if path.suffix != _LARGE:
            sync(path)


def find_damage(directory: Path) -> str | None:
    """The first missing or changed file, as a sentence; None if the checkpoint is intact.

    Raises:
        OSError: A file exists but cannot be read.
    """
    try:
        listed: dict[str, dict[str, int]] = json.loads((directory / FILES).read_text())
        unknown = [name for name in _READ if name not in listed and (directory / name).exists()]
        if unknown:
            return f"{FILES} does not list {unknown[0]}"
        for name, expected in listed.items():
            if Path(name).is_absolute() or ".." in Path(name).parts:
                return f"{FILES} lists {name}, which is outside the checkpoint"
            size = (directory / name).stat().st_size
            if size != expected["bytes"]:
                return f"{name} has {size} bytes, but {expected['bytes']} were written"
            if "crc32" in expected and _checksum(directory / name) != {"crc32": expected["crc32"]}:
                return f"{name} has a wrong checksum"
    except FileNotFoundError as error:
        return f"{Path(error.filename).relative_to(directory)} is missing"
    except (ValueError, AttributeError, TypeError, KeyError, RecursionError) as error:
        return f"{FILES} cannot be read ({type(error).__name__}: {error})"
    return None


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON file of a checkpoint."""
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")


def sync(path: Path) -> None:
    """fsync a file or directory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _checksum(path: Path) -> dict[str, int]:
    return {} if path.suffix == _LARGE else {"crc32": zlib.crc32(path.read_bytes())}
