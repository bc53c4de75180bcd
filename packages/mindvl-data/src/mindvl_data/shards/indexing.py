# SPDX-License-Identifier: Apache-2.0
"""Shards -> a validated index beside each of them, and a manifest.

Comes after the shards are written; see docs/reference/data-format.md for what is on disk. Shards are independent, so they are
looked at in several processes; only duplicate keys are searched over all of them, at the end. A shard whose size,
time and index are those of an earlier call is not read again, and a call that was stopped goes on where it was.
"""

import hashlib
import json
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindvl_data.errors import DataError
from mindvl_data.process import end_with_parent
from mindvl_data.shards.atomic import write_atomically
from mindvl_data.shards.claim import claimed
from mindvl_data.shards.index_format import INDEX_MAGIC, index_arrays, is_index, shard_name
from mindvl_data.shards.known import (
    DUPLICATE,
    Entry,
    is_current,
    known_entries,
    left_out_by_write,
    media_counts,
    note,
    start_over,
)
from mindvl_data.shards.manifest import INDEXING_NAME, MANIFEST_NAME, MANIFEST_VERSION
from mindvl_data.shards.scan import map_shard
from mindvl_data.shards.sealed import seal
from mindvl_data.shards.tar import BLOCK, EXCLUDED_NAME, SHARD_PATTERN, WRITING_MARK, name_in_header, split_name
from mindvl_data.shards.validation import Excluded, Rules, validate_shard

Progress = Callable[[int, int], None]  # (done, total) in bytes


def index_directory(
    directory: Path | str,
    *,
    decode_limit: int = 80_000_000,
    exclude_bad: bool = False,
    decode: bool = False,
    workers: int = 1,
    fresh: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Validate every shard of a directory and write its index; returns the manifest.

    Args:
        decode_limit: Pixels; an image that claims more is refused.
        exclude_bad: Leave samples that cannot be used out of the index and name them in `excluded.jsonl`, instead of
            refusing the directory.
        decode: Decode every image and video, which also finds damage inside of them.
        workers: Processes that read shards; the result does not depend on it.
        fresh: Read all shards again, also those that did not change.

    Raises:
        DataError: A shard is damaged or holds something that cannot be used; no index is written for that shard. Or
            the directory was not written to its end, or nothing can be written into it.
    """
    directory = Path(directory)
    rules = Rules(decode_limit=decode_limit, exclude_bad=exclude_bad, decode=decode)
    _shards(directory)  # refused before anything is written into a directory that has none
    try:
        with claimed(directory):
            return _index(directory, rules, workers=workers, fresh=fresh, progress=progress)
    except OSError as error:
        raise DataError(
            f"index cannot be written: {error.strerror}. {error.filename or directory}. Make room, or index a copy that "
            "can be written to; the same command goes on."
        ) from error


def _index(directory: Path, rules: Rules, *, workers: int, fresh: bool, progress: Progress | None) -> dict[str, Any]:
    paths = _shards(directory)
    left_out = left_out_by_write(directory)
    known = {} if fresh else known_entries(directory, rules)
    entries = {path.name: known[path.name] for path in paths if is_current(path, known.get(path.name))}
    todo = [path for path in paths if path.name not in entries]
    sizes = {path.name: path.stat().st_size for path in paths}
    if todo:
        start_over(directory, rules, entries.values())
    done_bytes = sum(sizes[name] for name in entries)
    for entry in _index_all(todo, rules, workers):
        entries[entry.name] = entry
        note(directory, entry)
        done_bytes += sizes[entry.name]
        if progress is not None:
            progress(done_bytes, sum(sizes.values()))
    return _finish(directory, [entries[path.name] for path in paths], rules, left_out)


def _shards(directory: Path) -> list[Path]:
    if (directory / WRITING_MARK).exists():
        raise DataError(
            f"shards are not complete: `mindvl data write` did not end. {directory / WRITING_MARK}. "
            "Write the directory again; the same command goes on."
        )
    paths = sorted(path for path in directory.glob(SHARD_PATTERN) if not path.is_dir())
    for path in paths:
        if not path.is_file():  # reading a pipe would wait for ever
            what = "a link to a file that does not exist" if path.is_symlink() else "not a regular file"
            raise DataError(f"{path}: is {what}. Put the shard back, or remove this name.")
    if not paths:
        raise DataError(
            f"no shards. {directory}. Write some with `mindvl data write SRC --format F --out {directory}`."
        )
    return paths


def _index_all(paths: list[Path], rules: Rules, workers: int) -> Iterator[Entry]:
    """Entries in the order of the paths; after an error, those of shards that were done come first."""
    if min(workers, len(paths)) <= 1:
        yield from (_index_shard(path, rules) for path in paths)
        return
    context = multiprocessing.get_context("forkserver")  # a plain fork would copy locks that other threads hold
    context.set_forkserver_preload([__name__])  # imports once, not in every process
    pool = ProcessPoolExecutor(min(workers, len(paths)), mp_context=context, initializer=end_with_parent)
    futures: list[Future[Entry]] = [pool.submit(_index_shard, path, rules) for path in paths]
    taken = 0
    try:
        for future in futures:
            entry = future.result()
            taken += 1
            yield entry
    except (DataError, BrokenExecutor) as error:
        pool.shutdown(cancel_futures=True)
        for future in futures[taken:]:
            if not future.cancelled() and future.exception() is None:
                yield future.result()
        if isinstance(error, DataError):
            raise
        raise DataError(f"a process that indexed shards died. {paths[taken]}. Use fewer --workers.") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _index_shard(path: Path, rules: Rules) -> Entry:
    status = path.stat()
    shard = validate_shard(path, rules)
    facts = {
        "name": path.name,
        "bytes": shard.num_bytes,
        "mtime_ns": status.st_mtime_ns,
        "sha256": shard.sha256,
        "index_sha256": _write_index(path, shard.samples, shard.members, shard.num_bytes),
        **media_counts(shard.samples, shard.members),
        "excluded": len(shard.excluded),
    }
    return Entry(facts=facts, excluded=shard.excluded)


def _write_index(path: Path, samples: NDArray[Any], members: NDArray[Any], num_bytes: int) -> str:
    """Returns the sha256 of the index file."""
    content = INDEX_MAGIC + np.array([len(samples), len(members), num_bytes], "<u8").tobytes()
    content += samples.tobytes() + members.tobytes()
    write_atomically(path.with_suffix(".idx"), content)
    return hashlib.sha256(content).hexdigest()


def _finish(directory: Path, entries: list[Entry], rules: Rules, left_out: list[dict[str, Any]]) -> dict[str, Any]:
    entries = _without_duplicates(directory, entries, rules)
    excluded = [line for entry in entries for line in entry.excluded]
    kept = [entry.facts for entry in entries if entry.facts["samples"]]
    if not kept:
        raise DataError(
            f"no sample is left of {len(entries)} shards; the first: {excluded[0]['reason']}. {directory}. "
            "Write the shards again."
        )
    manifest = {
        "version": MANIFEST_VERSION,
        "rules": asdict(rules),
        **{name: sum(facts[name] for facts in kept) for name in ("samples", "images", "videos", "bytes")},
        "excluded": len(excluded),
        "empty_shards": [entry.name for entry in entries if not entry.facts["samples"]],
        "shards": kept,
    }
    _write_excluded(directory, [*left_out, *excluded])
    write_atomically(directory / MANIFEST_NAME, seal(manifest))
    (directory / INDEXING_NAME).unlink(missing_ok=True)
    _remove_leftovers(directory, {entry.name for entry in entries})
    return manifest


def _remove_leftovers(directory: Path, shards: set[str]) -> None:
    """What kills left, and index files of shards that are gone."""
    for pattern in (".*.idx.*.partial", ".*.json*.partial"):
        for left in directory.glob(pattern):
            left.unlink()
    for path in directory.glob("*.idx"):
        if shard_name(path.name) not in shards and path.is_file() and is_index(path):
            path.unlink()


def _write_excluded(directory: Path, lines: list[dict[str, Any]]) -> None:
    path = directory / EXCLUDED_NAME
    if lines:
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in lines).encode())
    else:
        path.unlink(missing_ok=True)


def _without_duplicates(directory: Path, entries: list[Entry], rules: Rules) -> list[Entry]:
    """Refuse or leave out samples whose key stands in an earlier shard."""
    hashes = [_read_index(directory / entry.name)[0]["key_hash"] for entry in entries]
    every = np.concatenate(hashes)
    order = np.argsort(every, kind="stable")
    is_same = every[order[1:]] == every[order[:-1]]
    if not is_same.any():
        return entries
    starts = np.cumsum([0, *(len(each) for each in hashes)])
    rows: dict[int, dict[int, str]] = {}  # number of the shard -> row -> shard that has the key already
    first = order[0]
    for place, same in zip(order[1:].tolist(), is_same.tolist(), strict=True):
        if not same:
            first = place
            continue
        shard = int(np.searchsorted(starts, place, "right")) - 1
        earlier = entries[int(np.searchsorted(starts, first, "right")) - 1].name
        rows.setdefault(shard, {})[place - int(starts[shard])] = earlier
    entries = list(entries)
    for number in sorted(rows):
        entries[number] = _leave_out(directory / entries[number].name, entries[number], rows[number], rules)
    return entries


def _leave_out(path: Path, entry: Entry, rows: dict[int, str], rules: Rules) -> Entry:
    samples, members = _read_index(path)
    lines: list[Excluded] = []
    with map_shard(path) as content:
        for row in sorted(rows):
            start = int(samples["offset"][row]) - BLOCK
            key = split_name(name_in_header(content[start : start + BLOCK]))[0]
            if not rules.exclude_bad:
                raise DataError(
                    f"sample {key!r}: {DUPLICATE}{rows[row]}. {path} at byte {start}. "
                    "Write the shard again without it, or leave such samples out with --exclude-bad."
                )
            lines.append({"shard": path.name, "key": key, "offset": start, "reason": DUPLICATE + rows[row]})
    is_kept = np.ones(len(samples), np.bool_)
    is_kept[list(rows)] = False
    kept_members = members[np.repeat(is_kept, samples["num_members"])]
    kept = samples[is_kept].copy()
    kept["first_member"] = np.cumsum(kept["num_members"]) - kept["num_members"]
    facts = {
        **entry.facts,
        "index_sha256": _write_index(path, kept, kept_members, entry.facts["bytes"]),
        **media_counts(kept, kept_members),
        "excluded": len(entry.excluded) + len(lines),
    }
    return Entry(facts=facts, excluded=entry.excluded + lines)


def _read_index(path: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    arrays = index_arrays(path.with_suffix(".idx").read_bytes())
    if arrays is None:
        raise DataError(f"{path.with_suffix('.idx')}: was changed while shards were indexed. Start again.")
    return arrays
