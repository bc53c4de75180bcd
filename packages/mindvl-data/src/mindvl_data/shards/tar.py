# SPDX-License-Identifier: Apache-2.0
"""Tar shards: written with the same bytes every time, scanned without trust.

Comes after the input formats, before the index. Format: POSIX ustar in the WebDataset convention (members that share
the name up to the first dot are one sample). Nothing is ever extracted to disk or unpickled.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from mindvl_data.errors import DataError

BLOCK = 512
RECORD_EXTENSIONS = ("json", "txt")
IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp")
MAX_MEMBER_BYTES = 1 << 30
SHARD_PATTERN = "*.tar"
WRITING_MARK = "writing"  # a file of this name lies in a folder until its last shard is written


@dataclass(frozen=True, kw_only=True)
class Member:
    """One file of a shard; `offset` and `length` are those of its content."""

    name: str
    offset: int
    length: int

    @property
    def key(self) -> str:
        return self.name.split(".", 1)[0]

    @property
    def extension(self) -> str:
        return self.name.rsplit(".", 1)[-1].lower()


class ShardWriter:
    """Writes one tar under a temporary name and gives it its own name only when it is whole and on disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._partial = path.with_name(f".{path.name}.partial")
        self._file: BinaryIO = open(self._partial, "wb", buffering=1 << 20)  # noqa: SIM115 - closed by commit or abort

    def add(self, name: str, content: bytes) -> None:
        """Append one member."""
        self._file.write(tar_header(name, len(content)))
        self._file.write(content)
        self._file.write(bytes(-len(content) % BLOCK))

    def commit(self) -> None:
        """End the archive, flush it to disk, and make it visible."""
        self._file.write(bytes(2 * BLOCK))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._partial, self._path)

    def abort(self) -> None:
        """Leave nothing behind."""
        self._file.close()
        self._partial.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if kind is None:
            self.commit()
        else:
            self.abort()


def tar_header(name: str, length: int) -> bytes:
    """The ustar header of a plain file: mode 0644, owner 0, time 0, so that equal input gives equal bytes."""
    encoded = name.encode("ascii")
    if len(encoded) > 100:
        raise DataError(f"member name {name!r} has {len(encoded)} characters. Use keys of at most 90.")
    head = encoded.ljust(100, b"\0") + b"0000644\x000000000\x000000000\x00%011o\x0000000000000\x00" % length
    tail = b"0" + bytes(100) + b"ustar\x0000" + bytes(247)
    checksum = sum(head) + 8 * 32 + sum(tail)
    return head + b"%06o\x00 " % checksum + tail


def scan_members(path: Path) -> Iterator[Member]:
    """Walk over the headers of a shard.

    Raises:
        DataError: A header is damaged, the file ends early, or a member is something other than a plain file with a
            safe name. The message names file and offset.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        offset = 0
        while True:
            file.seek(offset)
            header = file.read(BLOCK)
            if len(header) < BLOCK:
                raise DataError(
                    f"truncated shard: no end mark. {path} at byte {offset}: the file ends. Write or copy it again."
                )
            if not any(header):
                _check_end(file, path, offset + BLOCK)
                return
            kind = header[156:157]
            member = _parse_header(header, path, offset)
            if member.offset + member.length > size:
                raise DataError(
                    f"truncated shard: member {member.name!r} has {member.length} bytes, {size - member.offset} are "
                    f"there. {path} at byte {offset}. Write or copy it again."
                )
            if kind in (b"x", b"g"):
                _check_extended_header(file.read(member.length), path, offset)
            else:
                yield member
            offset = member.offset + member.length + (-member.length % BLOCK)


def _check_extended_header(records: bytes, path: Path, offset: int) -> None:
    """Times and owners do not matter; a name or size that replaces that of the next header does."""
    for keyword in (b" path=", b" size=", b" linkpath=", b" GNU.sparse"):
        if keyword in records:
            raise DataError(
                f"extended header sets {keyword.strip(b' =').decode()}. {path} at byte {offset}. "
                "Use keys of at most 90 ASCII characters and write the shard again."
            )


def _check_end(file: BinaryIO, path: Path, offset: int) -> None:
    while block := file.read(1 << 16):
        if any(block):
            raise DataError(
                f"data after the end mark. {path} at byte {offset}: a header before it was wiped, or two archives were "
                "joined. Write or copy the shard again."
            )
        offset += len(block)


def _parse_header(header: bytes, path: Path, offset: int) -> Member:
    stored = header[148:156].strip(b"\0 ")
    computed = sum(header) - sum(header[148:156]) + 8 * 32
    if not stored.isdigit() or _octal(stored) != computed:
        raise DataError(f"damaged tar header: its checksum is wrong. {path} at byte {offset}. Write or copy it again.")
    kind = header[156:157]
    name = header[:100].rstrip(b"\0").decode("utf-8", "replace")
    prefix = header[345:500].rstrip(b"\0").decode("utf-8", "replace") if header[257:262] == b"ustar" else ""
    name = f"{prefix}/{name}" if prefix else name
    if kind not in (b"0", b"\0", b"x", b"g"):
        raise DataError(
            f"member {name!r} is not a plain file (type {kind!r}). {path} at byte {offset}. "
            "Shards hold plain files only: no links, folders or devices."
        )
    if name.startswith("/") or ".." in name.split("/") or not name:
        raise DataError(f"member name {name!r} leaves the archive. {path} at byte {offset}. Rename the member.")
    length_field = header[124:136].strip(b"\0 ")
    if not length_field or any(c not in b"01234567" for c in length_field):
        raise DataError(f"member {name!r} has no readable size. {path} at byte {offset}. Write or copy it again.")
    length = _octal(length_field)
    if length > MAX_MEMBER_BYTES:
        raise DataError(
            f"member {name!r} has {length} bytes, more than {MAX_MEMBER_BYTES}. {path} at byte {offset}. Leave it out."
        )
    return Member(name=name, offset=offset + BLOCK, length=length)


def _octal(field: bytes) -> int:
    try:
        return int(field, 8)
    except ValueError:
        return -1
