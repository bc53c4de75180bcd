# SPDX-License-Identifier: Apache-2.0
"""The progress of `mindvl data write`: the file `writing`, from which an interrupted write resumes.

The file exists until the last shard is complete and is replaced after every shard. The source and the options in it are
compared with those of the next start, because shards of two different writes must not mix.
"""

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mindvl_data.errors import DataError
from mindvl_data.shards.atomic import write_atomically
from mindvl_data.shards.sealed import SealError, seal, unseal
from mindvl_data.shards.tar import WRITING_MARK

VERSION = 1
_MAX_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Done:
    """What is complete on disk."""

    shards: int = 0
    rows: int = 0  # records read from the source, including excluded ones
    samples: int = 0
    excluded: int = 0
    excluded_bytes: int = 0  # of excluded.jsonl; later bytes belong to an unfinished shard


class WriteMark:
    """The file `writing` of one directory.

    Args:
        directory: Output directory of the write.
        source: Identity of the source, see `source_identity`.
        options: Options that determine the content of the shards.
    """

    def __init__(self, directory: Path, source: dict[str, Any], options: dict[str, Any]) -> None:
        self._path = directory / WRITING_MARK
        self._settings = {"version": VERSION, "source": source, "options": options}

    def load(self) -> Done:
        """What an interrupted write has completed; nothing if there is no valid file.

        Raises:
            DataError: Shards exist, but from another source or with other options.
        """
        try:
            found = unseal(self._path, max_bytes=_MAX_BYTES)
            done = Done(**found["done"])
        except (OSError, SealError, KeyError, TypeError):
            return Done()  # no file, or a damaged one
        if done.shards:
            self._refuse_changes(found)
        return done

    def save(self, done: Done) -> None:
        """Replace the file."""
        write_atomically(self._path, seal({**self._settings, "done": asdict(done)}))

    def remove(self) -> None:
        """Remove the file, after the last shard is complete."""
        self._path.unlink()

    def _refuse_changes(self, found: dict[str, Any]) -> None:
        changes = [
            f"{part} {name} was {found.get(part, {}).get(name)!r}, got {value!r}"
            for part in ("source", "options")
            for name, value in self._settings[part].items()  # type: ignore[attr-defined]
            if found.get(part, {}).get(name) != value
        ]
        if found.get("version") != VERSION:
            changes.append(f"version was {found.get('version')}, got {VERSION}")
        if changes:
            raise DataError(
                f"{self._path}: the interrupted write cannot be resumed: {'; '.join(changes)}. "
                "Use the same source and options, or start over with --fresh."
            )


def source_identity(path: Path) -> dict[str, Any]:
    """An identity of a source that needs no reading: number, size and digest of names, sizes and times of its files."""
    root = path.parent if "*" in path.name else path  # a pattern of file names
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    files = files if root == path else sorted(root.glob(path.name))
    digest, total = hashlib.sha256(), 0
    for file in files:
        status = file.stat()
        total += status.st_size
        digest.update(f"{file.relative_to(root)}\0{status.st_size}\0{status.st_mtime_ns}\n".encode("utf-8", "replace"))
    return {"files": len(files), "bytes": total, "digest": digest.hexdigest()[:16]}
