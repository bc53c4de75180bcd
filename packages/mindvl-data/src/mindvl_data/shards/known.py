# SPDX-License-Identifier: Apache-2.0
"""The results of earlier indexing, so that an unchanged shard is not read again.

Used by indexing.py. The results are in the manifest, or, while indexing has not finished, in `indexing.jsonl`. All of
them are checked: if a line is damaged, its shard is read again.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from mindvl_data.errors import DataError
from mindvl_data.shards.atomic import write_atomically
from mindvl_data.shards.index_format import index_arrays, sha256_of
from mindvl_data.shards.manifest import INDEXING_NAME, MANIFEST_NAME, MANIFEST_VERSION, check_entry, read_manifest
from mindvl_data.shards.sealed import SealError, seal, unseal_text
from mindvl_data.shards.tar import EXCLUDED_NAME
from mindvl_data.shards.validation import Excluded, Rules

DUPLICATE = "duplicate key, already in "  # start of the one reason for exclusion that depends on other shards


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The result of indexing one shard."""

    facts: dict[str, Any]  # its entry in the manifest
    excluded: list[Excluded]

    @property
    def name(self) -> str:
        return str(self.facts["name"])


def known_entries(directory: Path, rules: Rules) -> dict[str, Entry]:
    """The shards that an earlier call, finished or interrupted, has indexed with the same rules.

    Damaged results are left out, so that their shards are read again.
    """
    if (directory / INDEXING_NAME).is_file():
        return _entries_of_interrupted_call(directory / INDEXING_NAME, rules)
    try:
        manifest = read_manifest(directory / MANIFEST_NAME, directory)
        if manifest.rules != asdict(rules):
            return {}
        excluded: dict[Any, list[Excluded]] = {}
        for line in _json_lines(directory / EXCLUDED_NAME):
            excluded.setdefault(line.get("shard"), []).append(line)
    except DataError:
        return {}
    entries = [Entry(facts=facts, excluded=excluded.get(facts["name"], [])) for facts in manifest.shards]
    return {entry.name: entry for entry in entries if len(entry.excluded) == entry.facts.get("excluded")}


def _entries_of_interrupted_call(path: Path, rules: Rules) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for number, line in enumerate(path.read_bytes().splitlines()):
        try:
            content = unseal_text(line)  # an interrupted write can leave a partial last line
            if number == 0:
                if content != {"version": MANIFEST_VERSION, "rules": asdict(rules)}:
                    return {}
                continue
            entry = Entry(facts=check_entry(content.get("facts")), excluded=content["excluded"])
            entries[entry.name] = entry
        except (SealError, KeyError):
            if number == 0:
                return {}
    return entries


def _json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON lines file; a partial last line, left by an interrupted write, is ignored.

    Raises:
        DataError: Another line is damaged.
    """
    if not path.is_file():
        return []
    lines = []
    for number, text in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if not text.endswith(b"\n"):
            break
        try:
            line = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{path}:{number}: the line is damaged: {error}. Restore the file, or remove it."
            ) from error
        if not isinstance(line, dict):
            raise DataError(
                f"{path}:{number}: the line must be an object, got {type(line).__name__}. Restore the file, or remove it."
            )
        lines.append(line)
    return lines


def excluded_by_write(directory: Path) -> list[dict[str, Any]]:
    """The lines of `excluded.jsonl` from `mindvl data write`; indexing cannot reproduce them."""
    return [line for line in _json_lines(directory / EXCLUDED_NAME) if "shard" not in line]


def is_current(path: Path, entry: Entry | None) -> bool:
    """Whether a shard and its index file have not changed since the entry was made."""
    if entry is None or any(str(line.get("reason")).startswith(DUPLICATE) for line in entry.excluded):
        return False  # whether a key is a duplicate depends on other shards
    status, index_path = path.stat(), path.with_suffix(".idx")
    if (status.st_size, status.st_mtime_ns) != (entry.facts["bytes"], entry.facts.get("mtime_ns")):
        return False
    if not index_path.is_file() or sha256_of(index_path) != entry.facts["index_sha256"]:
        return False
    arrays = index_arrays(index_path.read_bytes())
    return arrays is not None and media_counts(*arrays).items() <= entry.facts.items()


def media_counts(samples: NDArray[Any], members: NDArray[Any]) -> dict[str, int]:
    """The counts of one index file for the manifest."""
    num_videos = int((members["frames"] > 0).sum())
    num_images = int((members["height"] > 0).sum()) - num_videos
    return {"samples": len(samples), "images": num_images, "videos": num_videos}


def begin_indexing(directory: Path, rules: Rules, entries: Iterable[Entry]) -> None:
    """Begin indexing: write the known entries to `indexing.jsonl` and remove the manifest."""
    lines = [{"version": MANIFEST_VERSION, "rules": asdict(rules)}, *(asdict(entry) for entry in entries)]
    write_atomically(directory / INDEXING_NAME, b"".join(seal(line, indent=None) + b"\n" for line in lines))
    (directory / MANIFEST_NAME).unlink(missing_ok=True)


def record_entry(directory: Path, entry: Entry) -> None:
    """Record that a shard is indexed."""
    with open(directory / INDEXING_NAME, "ab") as file:
        file.write(seal(asdict(entry), indent=None) + b"\n")
