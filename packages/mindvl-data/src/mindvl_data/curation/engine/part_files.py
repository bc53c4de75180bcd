# SPDX-License-Identifier: Apache-2.0
"""Files of one part between two segments: records, signatures, lists, and a summary that is written last.

Written by part_run.py, read by the next segment, by the decisions of set steps, and by the output writer. A file has a
temporary name until it is complete and flushed to disk; the summary exists only if all other files are complete, so that
a killed run recomputes exactly the parts without a summary.

A record is stored as: length of the header (u32), number of media (u32), their lengths (u64 each), the header as JSON, the
media. Nothing is pickled.
"""

import json
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindvl_data.curation.record import Record

_HEAD = struct.Struct("<II")
_BUFFER = 1 << 20

SignatureBlock = tuple[NDArray[np.uint64], NDArray[np.uint32], NDArray[np.uint8]]


def part_name(number: int) -> str:
    """Start of the names of a part's files."""
    return f"part-{number:08d}"


def summary_path(directory: Path, number: int) -> Path:
    """The file that exists if the part is complete."""
    return directory / f"{part_name(number)}.json"


def records_path(directory: Path, number: int) -> Path:
    """Records that reached the end of the segment."""
    return directory / f"{part_name(number)}.records"


def signatures_path(directory: Path, number: int) -> Path:
    """Signatures for the set step at the end of the segment."""
    return directory / f"{part_name(number)}.signatures"


def list_path(directory: Path, number: int, kind: str) -> Path:
    """JSON lines of `dropped` or `quarantine`."""
    return directory / f"{part_name(number)}.{kind}.jsonl"


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy as Python values."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(
        f"a value of type {type(value).__name__} cannot be stored; fields are numbers, strings, booleans or lists"
    )


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_plain)


def to_json(value: Any) -> bytes:
    """Compact JSON in UTF-8; lone surrogates are kept as escapes of JSON."""
    return _ENCODER.encode(value).encode("utf-8", "backslashreplace")


def framed(header: bytes, media: Iterable[bytes]) -> bytes:
    """One record as it is stored."""
    media = tuple(media)
    head = _HEAD.pack(len(header), len(media))
    if not media:
        return head + header
    return b"".join((head, struct.pack(f"<{len(media)}Q", *map(len, media)), header, *media))


def frames(path: Path, *, skip: int = 0) -> Iterator[tuple[bytes, tuple[bytes, ...]]]:
    """(header, media) of every record of a file after the first `skip`."""
    with open(path, "rb", buffering=_BUFFER) as file:
        while head := file.read(_HEAD.size):
            header_length, num_media = _HEAD.unpack(head)
            lengths = struct.unpack(f"<{num_media}Q", file.read(8 * num_media)) if num_media else ()
            if skip:
                skip -= 1
                file.seek(header_length + sum(lengths), os.SEEK_CUR)
                continue
            header = file.read(header_length)
            yield header, tuple(file.read(length) for length in lengths)


def record_frame(record: Record) -> bytes:
    """A record with everything that the next segment needs."""
    return framed(to_json([record.number, record.piece, record.id, record.body, record.facts]), record.media)


def read_records(path: Path) -> Iterator[Record]:
    """The records of a file."""
    for header, media in frames(path):
        number, piece, name, body, facts = json.loads(header)
        yield Record(number=number, piece=piece, id=name, body=body, media=media, facts=facts)


def signature_frame(numbers: list[int], pieces: list[int], signatures: NDArray[np.uint8]) -> bytes:
    """A block of signatures: rows (u64), width (u64), then the three arrays."""
    rows, width = signatures.shape
    return b"".join(
        (
            struct.pack("<QQ", rows, width),
            np.asarray(numbers, "<u8").tobytes(),
            np.asarray(pieces, "<u4").tobytes(),
            np.ascontiguousarray(signatures, np.uint8).tobytes(),
        )
    )


def read_signatures(path: Path) -> Iterator[SignatureBlock]:
    """The blocks of a file of signatures."""
    with open(path, "rb", buffering=_BUFFER) as file:
        while head := file.read(16):
            rows, width = struct.unpack("<QQ", head)
            numbers = np.frombuffer(file.read(8 * rows), "<u8")
            pieces = np.frombuffer(file.read(4 * rows), "<u4")
            yield numbers, pieces, np.frombuffer(file.read(rows * width), np.uint8).reshape(rows, width)
