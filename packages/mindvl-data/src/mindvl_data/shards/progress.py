# SPDX-License-Identifier: Apache-2.0
"""How far `data write` has come: the file `writing`, which makes a stopped write go on after its last whole shard.

It lies in the directory until the last shard is whole, and is replaced after every shard. What it says of source and
options is compared with the next start, since shards of two different writes must never mix.
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
    """What is safely on disk."""

    shards: int = 0
    rows: int = 0  # of the source, excluded ones included
    samples: int = 0
    excluded: int = 0
    excluded_bytes: int = 0  # of excluded.jsonl; what lies after them belongs to a shard that was not finished


class WriteMark:
    """The file `writing` of one directory."""

    def __init__(self, directory: Path, source: dict[str, Any], options: dict[str, Any]) -> None:
        self._path = directory / WRITING_MARK
        self._said = {"version": VERSION, "source": source, "options": options}

    def load(self) -> Done:
        """Where to go on; from the start where nothing is on disk.

        Raises:
            DataError: Shards are there, but of another source or with other options.
        """
        try:
            found = unseal(self._path, max_bytes=_MAX_BYTES)
            done = Done(**found["done"])
        except (OSError, SealError, KeyError, TypeError):
            return Done()  # no mark, a damaged one, or one that a kill left before the first shard
        if done.shards:
            self._refuse_changes(found)
        return done

    def save(self, done: Done) -> None:
        """Replace the mark."""
        write_atomically(self._path, seal({**self._said, "done": asdict(done)}))

    def remove(self) -> None:
        """The last shard is whole."""
        self._path.unlink()

    def _refuse_changes(self, found: dict[str, Any]) -> None:
        changes = [
            f"{part} {name} was {found.get(part, {}).get(name)!r} and is {value!r}"
            for part in ("source", "options")
            for name, value in self._said[part].items()  # type: ignore[attr-defined]
            if found.get(part, {}).get(name) != value
        ]
        if found.get("version") != VERSION:
            changes.append(f"version was {found.get('version')} and is {VERSION}")
        if changes:
            raise DataError(
                f"cannot go on with another write: {'; '.join(changes)}. {self._path}. "
                "Use what it was, or start over with --fresh."
            )


def source_identity(path: Path) -> dict[str, Any]:
    """What tells two sources apart without reading them: names, sizes and times of their files."""
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    digest, total = hashlib.sha256(), 0
    for file in files:
        status = file.stat()
        total += status.st_size
        digest.update(f"{file.relative_to(path)}\0{status.st_size}\0{status.st_mtime_ns}\n".encode("utf-8", "replace"))
    return {"files": len(files), "bytes": total, "digest": digest.hexdigest()[:16]}
