# SPDX-License-Identifier: Apache-2.0
"""Shards -> a validated index beside each of them, and a manifest.

Comes after the shards are written; see index.py for what is on disk.
"""

import hashlib
import json
import mmap
import zlib
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindvl_data.errors import BadSample, DataError
from mindvl_data.images import read_size
from mindvl_data.samples import parse_sample
from mindvl_data.shards.index import (
    INDEX_MAGIC,
    MANIFEST_NAME,
    MANIFEST_VERSION,
    MEMBER_DTYPE,
    SAMPLE_DTYPE,
    key_of,
    write_atomically,
)
from mindvl_data.shards.tar import (
    IMAGE_EXTENSIONS,
    RECORD_EXTENSIONS,
    SHARD_PATTERN,
    WRITING_MARK,
    Member,
    scan_members,
)
from mindvl_data.types import MediaSize, RawSample

Progress = Callable[[int, int], None]  # (done, total) in bytes


def index_folder(
    folder: Path | str, *, decode_limit: int = 80_000_000, progress: Progress | None = None
) -> dict[str, Any]:
    """Validate every shard of a folder and write its index; returns the manifest.

    Raises:
        DataError: A shard is damaged or holds something that cannot be used; nothing is written for that shard. Or
            the folder was not written to its end.
    """
    folder = Path(folder)
    if (folder / WRITING_MARK).exists():
        raise DataError(
            f"shards are not complete: `mindvl data write` did not end. {folder / WRITING_MARK}. "
            "Write the folder again; the same command starts over."
        )
    paths = sorted(folder.glob(SHARD_PATTERN))
    if not paths:
        raise DataError(f"no shards. {folder}. Write some with `mindvl data write SRC --format F --out {folder}`.")
    total_bytes = sum(path.stat().st_size for path in paths)
    done_bytes = 0
    seen: dict[int, str] = {}
    entries: list[dict[str, Any]] = []
    for path in paths:
        samples, members, digest = _index_shard(path, seen, decode_limit)
        size = path.stat().st_size
        content = INDEX_MAGIC + np.array([len(samples), len(members), size], "<u8").tobytes()
        content += samples.tobytes() + members.tobytes()
        write_atomically(path.with_suffix(".idx"), content)
        entries.append(
            {
                "name": path.name,
                "bytes": size,
                "sha256": digest,
                "index_sha256": hashlib.sha256(content).hexdigest(),
                "samples": len(samples),
                "images": len(members) - len(samples),
            }
        )
        done_bytes += size
        if progress is not None:
            progress(done_bytes, total_bytes)
    manifest = {
        "version": MANIFEST_VERSION,
        "samples": sum(e["samples"] for e in entries),
        "images": sum(e["images"] for e in entries),
        "bytes": total_bytes,
        "shards": entries,
    }
    write_atomically(folder / MANIFEST_NAME, json.dumps(manifest, indent=1).encode())
    return manifest


def _index_shard(path: Path, seen: dict[int, str], decode_limit: int) -> tuple[NDArray[Any], NDArray[Any], str]:
    members = list(scan_members(path))  # all headers first: a damaged one is found before contents are believed
    samples_rows: list[tuple[Any, ...]] = []
    member_rows: list[tuple[int, int, int, int, int, float]] = []
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for key, group in _groups(members, path):
            hashed = key_of(key)
            if hashed in seen:
                raise _refusal(f"duplicate key {key!r}, already in {seen[hashed]}", path, group[0])
            seen[hashed] = path.name
            contents = [content[m.offset : m.offset + m.length] for m in group]
            is_json = group[0].extension == "json"
            try:
                sizes = tuple(MediaSize(*read_size(media, decode_limit=decode_limit)) for media in contents[1:])
                raw = RawSample(key=key, record=contents[0], is_json=is_json, media=tuple(contents[1:]), sizes=sizes)
                sample = parse_sample(raw)
            except BadSample as error:
                raise _refusal(f"sample {key!r}: {error}", path, group[0]) from error
            crc = 0
            for piece in contents:
                crc = zlib.crc32(piece, crc)
            start = min(m.offset for m in group)
            stop = max(m.offset + m.length for m in group)
            first = len(member_rows)
            row = (start, stop - start, first, len(group), sample.has_coordinates, is_json, hashed, crc)
            samples_rows.append((*row, sample.min_pixels or 0, sample.max_pixels or 0))
            for member, size in zip(group, (MediaSize(0, 0), *sizes), strict=True):
                member_rows.append((member.offset, member.length, size.height, size.width, size.frames, size.fps))
        digest = hashlib.sha256(content).hexdigest()
    return np.array(samples_rows, SAMPLE_DTYPE), np.array(member_rows, MEMBER_DTYPE), digest


def _groups(members: list[Member], path: Path) -> Iterator[tuple[str, list[Member]]]:
    """Members of each sample: the record first, then the pictures by number."""
    if not members:
        raise DataError(f"shard holds no sample. {path}. Remove it.")
    for key, group in groupby(members, key=lambda member: member.key):
        records, pictures = [], []
        for member in group:
            if member.extension in RECORD_EXTENSIONS:
                records.append(member)
            elif member.extension in IMAGE_EXTENSIONS:
                pictures.append(member)
            else:
                allowed = ", ".join((*RECORD_EXTENSIONS, *IMAGE_EXTENSIONS))
                raise _refusal(f"member {member.name!r} has an extension other than {allowed}", path, member)
        if len(records) != 1:
            raise _refusal(f"sample {key!r} has {len(records)} records (json or txt) instead of one", path, members[0])
        numbers = [_picture_number(picture, path) for picture in pictures]
        if sorted(numbers) != list(range(len(pictures))):
            raise _refusal(f"pictures of sample {key!r} are numbered {numbers} instead of 0, 1, ...", path, records[0])
        yield key, records + [picture for _, picture in sorted(zip(numbers, pictures, strict=True), key=lambda p: p[0])]


def _picture_number(picture: Member, path: Path) -> int:
    middle = picture.name.split(".")[1:-1]
    if not middle:
        return 0  # KEY.jpg, as plain webdataset folders have it
    if len(middle) == 1 and middle[0].isdigit():
        return int(middle[0])
    raise _refusal(f"member {picture.name!r} is not named KEY.NUMBER.EXTENSION", path, picture)


def _refusal(what: str, path: Path, member: Member) -> DataError:
    return DataError(f"{what}. {path} at byte {member.offset - 512}. Leave this sample out and write the shard again.")
