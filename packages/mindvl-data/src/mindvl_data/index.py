# SPDX-License-Identifier: Apache-2.0
"""Shards -> a validated, fixed-width, memory-mapped index and a manifest.

Comes after the shards are written; planner and reader know samples only through it. Picture sizes are stored, not
token counts, so that pixel budgets can change without a new index. Beside each shard `NAME.tar` lies `NAME.idx`:
magic (8 bytes), three little-endian uint64 (samples, members, bytes of the shard), then the two arrays below.
"""

import hashlib
import json
import mmap
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindvl_data.errors import BadSample, DataError
from mindvl_data.images import read_size
from mindvl_data.samples import parse_sample
from mindvl_data.shards import IMAGE_EXTENSIONS, RECORD_EXTENSIONS, SHARD_PATTERN, WRITING_MARK, Member, scan_members
from mindvl_data.types import RawSample

MANIFEST_NAME = "manifest.json"
MANIFEST_VERSION = 1
_MAGIC = b"MVLIDX01"
_HEADER_BYTES = len(_MAGIC) + 3 * 8

SAMPLE_DTYPE = np.dtype(
    [
        ("offset", "<u8"),  # first byte of the sample's contents
        ("length", "<u4"),  # bytes from there to the end of its last member
        ("first_member", "<u4"),
        ("num_members", "<u2"),  # the record, then the pictures in order
        ("has_coordinates", "u1"),  # its text depends on the pixel budget
        ("is_json", "u1"),
        ("key_hash", "<u8"),
        ("crc", "<u4"),  # crc32 over the members' contents, in order
    ]
)
MEMBER_DTYPE = np.dtype(
    [
        ("offset", "<u8"),
        ("length", "<u4"),
        ("height", "<u4"),  # pixels as shown; 0 for a record
        ("width", "<u4"),
    ]
)

Progress = Callable[[int, int], None]  # (done, total) in bytes


@dataclass(frozen=True, kw_only=True)
class ShardIndex:
    """The index of one shard."""

    path: Path  # the shard
    digest: str  # sha256 of the index file
    samples: NDArray[Any]  # SAMPLE_DTYPE
    members: NDArray[Any]  # MEMBER_DTYPE


@dataclass(frozen=True, kw_only=True)
class FolderIndex:
    """All shards of a folder, in name order."""

    folder: Path
    shards: tuple[ShardIndex, ...]
    num_samples: int
    num_images: int
    identity: str  # hash over all index files, so over every key, size and content crc

    @property
    def is_text(self) -> bool:
        return self.num_images == 0


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
        content = _MAGIC + np.array([len(samples), len(members), size], "<u8").tobytes()
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


def open_index(folder: Path | str) -> FolderIndex:
    """Map the index of a folder into memory.

    Raises:
        DataError: No index, another version, or shards that changed since.
    """
    folder = Path(folder)
    manifest_path = folder / MANIFEST_NAME
    if not manifest_path.is_file():
        raise DataError(f"no index. {folder}. Run `mindvl data index {folder}`.")
    manifest = json.loads(manifest_path.read_text())
    if manifest.get("version") != MANIFEST_VERSION:
        raise DataError(
            f"index version {manifest.get('version')} instead of {MANIFEST_VERSION}. {folder}. "
            "Run `mindvl data index` again."
        )
    shards = tuple(_open_shard_index(folder, entry) for entry in manifest["shards"])
    digest = hashlib.sha256("".join(shard.digest for shard in shards).encode())
    return FolderIndex(
        folder=folder,
        shards=shards,
        num_samples=manifest["samples"],
        num_images=manifest["images"],
        identity=digest.hexdigest(),
    )


def key_of(raw_name: str) -> int:
    """64-bit hash of a sample's key."""
    return int.from_bytes(hashlib.blake2b(raw_name.encode(), digest_size=8).digest(), "little")


def write_atomically(path: Path, content: bytes) -> None:
    """Write under another name, flush to disk, rename."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with open(partial, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _open_shard_index(folder: Path, entry: dict[str, Any]) -> ShardIndex:
    path = folder / entry["name"]
    index_path = path.with_suffix(".idx")
    for file in (path, index_path):
        if not file.is_file():
            raise DataError(f"{file.name} is missing. {folder}. Put it back or run `mindvl data index` again.")
    mapped = np.memmap(index_path, np.uint8, mode="r")
    num_samples, num_members, shard_bytes = (
        np.frombuffer(mapped[len(_MAGIC) : _HEADER_BYTES].tobytes(), "<u8").tolist()
        if mapped[: len(_MAGIC)].tobytes() == _MAGIC
        else (-1, -1, -1)
    )
    split = _HEADER_BYTES + num_samples * SAMPLE_DTYPE.itemsize
    whole = split + num_members * MEMBER_DTYPE.itemsize == len(mapped) and num_samples == entry["samples"]
    if not whole or path.stat().st_size != shard_bytes:
        what = "shard changed since it was indexed" if whole else "index file is damaged"
        raise DataError(f"{what}. {path if whole else index_path}. Run `mindvl data index {folder}` again.")
    return ShardIndex(
        path=path,
        digest=entry["index_sha256"],
        samples=mapped[_HEADER_BYTES:split].view(SAMPLE_DTYPE).view(np.ndarray),  # memmap objects are slow to slice
        members=mapped[split:].view(MEMBER_DTYPE).view(np.ndarray),
    )


def _index_shard(path: Path, seen: dict[int, str], decode_limit: int) -> tuple[NDArray[Any], NDArray[Any], str]:
    members = list(scan_members(path))  # all headers first: a damaged one is found before contents are believed
    samples_rows: list[tuple[Any, ...]] = []
    member_rows: list[tuple[int, int, int, int]] = []
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for key, group in _groups(members, path):
            hashed = key_of(key)
            if hashed in seen:
                raise _refusal(f"duplicate key {key!r}, already in {seen[hashed]}", path, group[0])
            seen[hashed] = path.name
            contents = [content[m.offset : m.offset + m.length] for m in group]
            is_json = group[0].extension == "json"
            try:
                sample = parse_sample(
                    RawSample(key=key, record=contents[0], is_json=is_json, media=tuple(contents[1:]))
                )
                sizes = [(0, 0), *(read_size(picture, decode_limit=decode_limit) for picture in contents[1:])]
            except BadSample as error:
                raise _refusal(f"sample {key!r}: {error}", path, group[0]) from error
            crc = 0
            for piece in contents:
                crc = zlib.crc32(piece, crc)
            start = min(m.offset for m in group)
            stop = max(m.offset + m.length for m in group)
            first = len(member_rows)
            samples_rows.append((start, stop - start, first, len(group), sample.has_coordinates, is_json, hashed, crc))
            member_rows += [(m.offset, m.length, *size) for m, size in zip(group, sizes, strict=True)]
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
