# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint was when it was finished: sizes of all its files, checksums of the small ones.

Written last, before the directory gets its name; compared before anything of a checkpoint is used (directory.read_manifest).
The large files hold boxes of tensors with a checksum each, which whoever reads a box compares
(megatron/tensor_files.py).
"""

import json
import os
import zlib
from pathlib import Path
from typing import Any

FILES = "files.json"
_LARGE = ".distcp"
_READ = ("manifest.json", "ledger.json", "tensors/.metadata")  # where these exist, files.json must know them


def seal(directory: Path) -> None:
    """Write files.json, and everything but the tensor files, which their writers did, to the disk."""
    listed: dict[str, dict[str, int]] = {}
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        listed[path.relative_to(directory).as_posix()] = {"bytes": path.stat().st_size} | _checksum(path)
    (directory / FILES).write_text(json.dumps(listed, indent=1) + "\n")
    for path in [*directory.rglob("*"), directory]:
        if path.suffix != _LARGE:
            sync(path)


def find_damage(directory: Path) -> str | None:
    """What is not as it was written: a sentence that names the file; None where nothing is.

    Raises:
        OSError: A file is there and cannot be read.
    """
    try:
        listed: dict[str, dict[str, int]] = json.loads((directory / FILES).read_text())
        unknown = [name for name in _READ if name not in listed and (directory / name).exists()]
        if unknown:
            return f"{FILES} does not know {unknown[0]}"
        for name, told in listed.items():
            if Path(name).is_absolute() or ".." in Path(name).parts:
                return f"{FILES} names {name}, which is outside of the checkpoint"
            size = (directory / name).stat().st_size
            if size != told["bytes"]:
                return f"{name} has {size} bytes, but {told['bytes']} were written"
            if "crc32" in told and _checksum(directory / name) != {"crc32": told["crc32"]}:
                return f"{name} has another content than what was written"
    except FileNotFoundError as error:
        return f"{Path(error.filename).relative_to(directory)} is missing"
    except (ValueError, AttributeError, TypeError, KeyError, RecursionError) as error:
        return f"{FILES} cannot be read ({type(error).__name__}: {error})"
    return None


def write_json(path: Path, value: dict[str, Any]) -> None:
    """One document of a checkpoint."""
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")


def sync(path: Path) -> None:
    """Wait until a file or the names in a directory are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _checksum(path: Path) -> dict[str, int]:
    return {} if path.suffix == _LARGE else {"crc32": zlib.crc32(path.read_bytes())}
