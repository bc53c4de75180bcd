# SPDX-License-Identifier: Apache-2.0
"""What earlier calls of indexing found out, so that a shard that did not change is not read again.

Used by indexing.py. It stands in the manifest, or, while a call has not ended, in `indexing.jsonl`. Nothing of it is
believed without a check: a damaged line costs only that its shard is read again.
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

DUPLICATE = "duplicate key, already in "  # how the reason begins that depends on the other shards


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What is known of one indexed shard."""

    facts: dict[str, Any]  # its entry in the manifest
    excluded: list[Excluded]

    @property
    def name(self) -> str:
        return str(self.facts["name"])


def known_entries(directory: Path, rules: Rules) -> dict[str, Entry]:
    """Shards that an earlier call has indexed by the same rules, whether it came to its end or was stopped.

    What is damaged is not known: those shards are read again.
    """
    if (directory / INDEXING_NAME).is_file():
        return _known_of_stopped_call(directory / INDEXING_NAME, rules)
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


def _known_of_stopped_call(path: Path, rules: Rules) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for number, line in enumerate(path.read_bytes().splitlines()):
        try:
            content = unseal_text(line)  # a kill can leave half a line at the end
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
    """The objects of a file of JSON lines; a kill can leave half of a line at the end.

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
            if not isinstance(line, dict):
                raise ValueError(f"{type(line).__name__} instead of an object")
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}:{number}: is damaged: {error}. Restore the file, or remove it.") from error
        lines.append(line)
    return lines


def left_out_by_write(directory: Path) -> list[dict[str, Any]]:
    """The lines of `excluded.jsonl` that `data write` wrote; nobody could write them again."""
    return [line for line in _json_lines(directory / EXCLUDED_NAME) if "shard" not in line]


def is_current(path: Path, entry: Entry | None) -> bool:
    """Whether a shard and its index file are those that the entry is about."""
    if entry is None or any(str(line.get("reason")).startswith(DUPLICATE) for line in entry.excluded):
        return False  # what is a duplicate depends on the other shards
    status, index_path = path.stat(), path.with_suffix(".idx")
    if (status.st_size, status.st_mtime_ns) != (entry.facts["bytes"], entry.facts.get("mtime_ns")):
        return False
    if not index_path.is_file() or sha256_of(index_path) != entry.facts["index_sha256"]:
        return False
    arrays = index_arrays(index_path.read_bytes())
    return arrays is not None and media_counts(*arrays).items() <= entry.facts.items()


def media_counts(samples: NDArray[Any], members: NDArray[Any]) -> dict[str, int]:
    """The counts that an index file gives the manifest."""
    num_videos = int((members["frames"] > 0).sum())
    num_images = int((members["height"] > 0).sum()) - num_videos
    return {"samples": len(samples), "images": num_images, "videos": num_videos}


def start_over(directory: Path, rules: Rules, entries: Iterable[Entry]) -> None:
    """From here on the directory has no index, until all of it is there."""
    lines = [{"version": MANIFEST_VERSION, "rules": asdict(rules)}, *(asdict(entry) for entry in entries)]
    write_atomically(directory / INDEXING_NAME, b"".join(seal(line, indent=None) + b"\n" for line in lines))
    (directory / MANIFEST_NAME).unlink(missing_ok=True)


def note(directory: Path, entry: Entry) -> None:
    """Put down that a shard is done."""
    with open(directory / INDEXING_NAME, "ab") as file:
        file.write(seal(asdict(entry), indent=None) + b"\n")
