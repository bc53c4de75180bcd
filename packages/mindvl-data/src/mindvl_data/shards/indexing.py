# SPDX-License-Identifier: Apache-2.0
"""Validate the shards of a directory and write an index file per shard and a manifest.

Comes after the shards are written; docs/reference/data-format.md describes the files. Shards are validated
independently, in several processes; only duplicate keys are searched over all shards, at the end. A shard whose size,
time and index have not changed since an earlier call is not read again, and an interrupted call resumes.
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
    begin_indexing,
    excluded_by_write,
    is_current,
    known_entries,
    media_counts,
    record_entry,
)
from mindvl_data.shards.manifest import INDEXING_NAME, MANIFEST_NAME, MANIFEST_VERSION, ORIGIN_NAME
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
    """Validate every shard of a directory and write its index.

    Args:
        directory: Directory of shards.
        decode_limit: Limit in pixels; a larger image is invalid.
        exclude_bad: Leave invalid samples out of the index and list them in `excluded.jsonl`, instead of raising.
        decode: Decode every image and video, which also detects damage in the compressed data.
        workers: Number of processes; the result does not depend on it.
        fresh: Read all shards again, including unchanged ones.
        progress: Called after each shard.

    Returns:
        The content of the manifest.

    Raises:
        DataError: A shard is damaged or holds an invalid sample; no index is written for that shard. Or writing the
            shards was interrupted, or the directory is not writable.
    """
    directory = Path(directory)
    rules = Rules(decode_limit=decode_limit, exclude_bad=exclude_bad, decode=decode)
    _shards(directory)  # raises before anything is written into a directory without shards
    try:
        with claimed(directory):
            return _index(directory, rules, workers=workers, fresh=fresh, progress=progress)
    except OSError as error:
        raise DataError(
            f"{error.filename2 or error.filename or directory}: the index cannot be written: {error.strerror}. "
            "Free disk space, or index a writable copy; the same command resumes."
        ) from error


def _index(directory: Path, rules: Rules, *, workers: int, fresh: bool, progress: Progress | None) -> dict[str, Any]:
    paths = _shards(directory)
    left_out = excluded_by_write(directory)
    known = {} if fresh else known_entries(directory, rules)
    entries = {path.name: known[path.name] for path in paths if is_current(path, known.get(path.name))}
    todo = [path for path in paths if path.name not in entries]
    sizes = {path.name: path.stat().st_size for path in paths}
    if todo:
        begin_indexing(directory, rules, entries.values())
    done_bytes = sum(sizes[name] for name in entries)
    for entry in _index_all(todo, rules, workers):
        entries[entry.name] = entry
        record_entry(directory, entry)
        done_bytes += sizes[entry.name]
        if progress is not None:
            progress(done_bytes, sum(sizes.values()))
    return _finish(directory, [entries[path.name] for path in paths], rules, left_out)


def _shards(directory: Path) -> list[Path]:
    if (directory / WRITING_MARK).exists():
        raise DataError(
            f"{directory / WRITING_MARK}: the shards are incomplete, because `mindvl data write` did not finish. "
            "Run it again; the same command resumes."
        )
    paths = sorted(path for path in directory.glob(SHARD_PATTERN) if not path.is_dir())
    for path in paths:
        if not path.is_file():  # reading a pipe would block
            what = "a link to a file that does not exist" if path.is_symlink() else "not a regular file"
            raise DataError(f"{path}: the path is {what}. Restore the shard, or remove the path.")
    if not paths:
        raise DataError(
            f"{directory}: the directory has no shards. Run `mindvl data write SRC --format F --out {directory}`."
        )
    return paths


def _index_all(paths: list[Path], rules: Rules, workers: int) -> Iterator[Entry]:
    """Entries in the order of the paths; after an error, finished shards are yielded before it is raised."""
    if min(workers, len(paths)) <= 1:
        yield from (_index_shard(path, rules) for path in paths)
        return
    context = multiprocessing.get_context("forkserver")  # fork would copy locks that other threads hold
    context.set_forkserver_preload([__name__])  # import once, not in every process
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
        raise DataError(
            f"{paths[taken]}: a worker process died, possibly for lack of memory. Use fewer --workers."
        ) from error
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
    """Write the index file of a shard; returns its sha256."""
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
            f"{directory}: none of the {len(entries)} shards has a valid sample; the first was excluded because: "
            f"{excluded[0]['reason']}. Write the shards again."
        )
    manifest = {
        "version": MANIFEST_VERSION,
        "rules": asdict(rules),
        **{name: sum(facts[name] for facts in kept) for name in ("samples", "images", "videos", "bytes")},
        "excluded": len(excluded),
        "empty_shards": [entry.name for entry in entries if not entry.facts["samples"]],
        "shards": kept,
        **_origin(directory),
    }
    _write_excluded(directory, [*left_out, *excluded])
    write_atomically(directory / MANIFEST_NAME, seal(manifest))
    (directory / INDEXING_NAME).unlink(missing_ok=True)
    _remove_leftovers(directory, {entry.name for entry in entries})
    return manifest


def _origin(directory: Path) -> dict[str, Any]:
    """The data set of the hub that the shards were written from, as the entry `origin` of the manifest."""
    path = directory / ORIGIN_NAME
    try:
        return {"origin": json.loads(path.read_bytes())}
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise DataError(f"{path}: is not JSON ({error}). Remove it, or write the shards again.") from error


def _remove_leftovers(directory: Path, shards: set[str]) -> None:
    """Remove temporary files of interrupted calls, and index files of removed shards."""
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
    """Refuse or exclude samples whose key is already in an earlier shard."""
    hashes = [_read_index(directory / entry.name)[0]["key_hash"] for entry in entries]
    every = np.concatenate(hashes)
    order = np.argsort(every, kind="stable")
    is_same = every[order[1:]] == every[order[:-1]]
    if not is_same.any():
        return entries
    starts = np.cumsum([0, *(len(each) for each in hashes)])
    rows: dict[int, dict[int, str]] = {}  # number of the shard -> position of the sample -> earlier shard with its key
    first = order[0]
    for position, same in zip(order[1:].tolist(), is_same.tolist(), strict=True):
        if not same:
            first = position
            continue
        shard = int(np.searchsorted(starts, position, "right")) - 1
        earlier = entries[int(np.searchsorted(starts, first, "right")) - 1].name
        rows.setdefault(shard, {})[position - int(starts[shard])] = earlier
    entries = list(entries)
    for number in sorted(rows):
        entries[number] = _exclude_rows(directory / entries[number].name, entries[number], rows[number], rules)
    return entries


def _exclude_rows(path: Path, entry: Entry, rows: dict[int, str], rules: Rules) -> Entry:
    samples, members = _read_index(path)
    lines: list[Excluded] = []
    with map_shard(path) as content:
        for row in sorted(rows):
            start = int(samples["offset"][row]) - BLOCK
            key = split_name(name_in_header(content[start : start + BLOCK]))[0]
            if not rules.exclude_bad:
                raise DataError(
                    f"{path} at byte {start}: sample {key!r}: {DUPLICATE}{rows[row]}. "
                    "Write the shard again without it, or exclude invalid samples with --exclude-bad."
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
        raise DataError(f"{path.with_suffix('.idx')}: the file changed while shards were indexed. Start again.")
    return arrays
