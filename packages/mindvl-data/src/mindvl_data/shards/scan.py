# SPDX-License-Identifier: Apache-2.0
"""Scan the tar headers of a shard, validating each; after damage, continue at the next valid header.

Comes before validation. Reads POSIX ustar, GNU and pax headers, as tar, Python and webdataset write them. Nothing is
extracted to disk or unpickled.
"""

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mindvl_data.errors import DataError
from mindvl_data.shards.tar import BLOCK, MAX_MEMBER_BYTES, Member, name_in_header, split_name

Content = bytes | mmap.mmap

_PLAIN = (b"0", b"\0")
_DIRECTORY = b"5"
_BODILESS = (b"1", b"2", b"3", b"4", b"5", b"6")  # links, devices, directories: nothing follows their header
_EXTENSIONS = (b"x", b"g", b"L", b"K")  # headers that apply to the next member, or to all


@dataclass(frozen=True, kw_only=True)
class Damage:
    """A damaged or unsupported part of a shard."""

    what: str
    offset: int  # of the header
    remedy: str = "Write or copy the shard again."
    # Of the sample it belongs to; None: unknown, so the samples before and after it may lack members.
    key: str | None = None

    def error(self, path: Path) -> DataError:
        """The error for a shard in which damage is not excluded."""
        return DataError(f"{path} at byte {self.offset}: {self.what}. {self.remedy}")


@contextmanager
def map_shard(path: Path) -> Iterator[Content]:
    """The bytes of a shard, memory-mapped."""
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed below; only errors of open() are caught
    except OSError as error:
        raise DataError(f"{path}: the shard cannot be read: {error.strerror}. Check its permissions.") from error
    with file:
        if os.fstat(file.fileno()).st_size == 0:
            yield b""
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            yield content


def walk(content: Content) -> Iterator[Member | Damage]:
    """Yield the members and the damaged parts of a shard, in order."""
    offset, long_name = 0, None
    last: Member | None = None
    while True:
        step = _step(content, offset, long_name)
        if step.found is not None:
            yield step.found
        if step.is_end:
            return
        long_name = step.long_name
        if isinstance(step.found, Member):
            last = step.found
        if not step.is_lost:
            offset = step.next
            continue
        # If the last member lost bytes, the next header is inside the span of that member: search from its start.
        found = _find_header(content, step.next if last is None else min(step.next, last.offset), exclude=offset)
        if last is not None and found is not None and (found < offset or (found - offset) % BLOCK):
            yield Damage(
                what=f"member {last.name!r} has lost or gained bytes", offset=last.offset - BLOCK, key=last.key
            )
        if found is None:
            return
        offset, last = found, None


@dataclass(frozen=True, kw_only=True)
class _Step:
    """The result of parsing one header."""

    found: Member | Damage | None = None
    next: int = 0
    long_name: str | None = None
    is_lost: bool = False  # the offset of the next header is unknown
    is_end: bool = False


def _step(content: Content, offset: int, long_name: str | None) -> _Step:
    header = content[offset : offset + BLOCK]
    if len(header) < BLOCK:
        return _lost("truncated shard: the end-of-archive marker is missing", offset)
    if not any(header):
        if not _holds_more(content, offset + BLOCK):
            return _Step(is_end=True)
        joined = "data after the end-of-archive marker: a header was overwritten, or two archives were concatenated"
        return _lost(joined, offset)
    if not _checksum_holds(header):
        return _lost("damaged tar header: its checksum is wrong", offset)
    kind, name, length = header[156:157], long_name or name_in_header(header), _length(header)
    body = offset + BLOCK
    if kind in _BODILESS:
        length = 0
    if length is None:
        return _lost(f"the size of member {name!r} is invalid", offset)
    if body + length > len(content):
        what = f"truncated shard: expected {length} bytes for member {name!r}, got {len(content) - body}"
        return _lost(what, offset, key=split_name(name)[0])
    following = body + length + (-length % BLOCK)
    if kind in _EXTENSIONS:
        return _extension(kind, content[body : body + length], offset, following, long_name)
    if kind == _DIRECTORY or (name.endswith("/") and not length):
        return _Step(next=following)
    refused = _refusal(kind, name, length, offset)
    return _Step(found=refused or Member(name=name, offset=body, length=length), next=following)


def _lost(what: str, offset: int, key: str | None = None) -> _Step:
    return _Step(found=Damage(what=what, offset=offset, key=key), next=offset + 1, is_lost=True)


def _refusal(kind: bytes, name: str, length: int, offset: int) -> Damage | None:
    """Why a member with a valid header is not used, or None."""
    what, remedy = "", ""
    if kind not in _PLAIN:
        what = f"member {name!r} is not a regular file (type {kind!r})"
        remedy = "Write the shard again with regular files only."
    elif name.startswith("/") or ".." in name.split("/") or not name:
        what, remedy = f"member name {name!r} is empty, absolute or contains ..", "Rename the member."
    elif length > MAX_MEMBER_BYTES:
        what, remedy = f"member {name!r} has {length} bytes, the limit is {MAX_MEMBER_BYTES}", "Remove it."
    return Damage(what=what, offset=offset, remedy=remedy, key=split_name(name)[0]) if what else None


def _extension(kind: bytes, content: bytes, offset: int, following: int, long_name: str | None) -> _Step:
    """Parse a header that holds a long name for the next member; its other fields are ignored."""
    if kind == b"L":
        return _Step(next=following, long_name=content.split(b"\0", 1)[0].decode("utf-8", "replace"))
    if kind == b"K":
        return _Step(next=following, long_name=long_name)
    try:
        fields = _pax_fields(content)
    except ValueError:
        return _lost("the extended header cannot be parsed", offset)
    bad = [name for name in fields if name == b"size" or name.startswith(b"GNU.sparse")]
    if bad or (kind == b"g" and b"path" in fields):
        what = f"the extended header sets {(bad or [b'path'])[0].decode('ascii', 'replace')}"
        remedy = "Write the shard again, with members of at most 1 GiB."
        return _Step(found=Damage(what=what, offset=offset, remedy=remedy), next=following)
    name = fields.get(b"path", b"").decode("utf-8", "replace")
    return _Step(next=following, long_name=name or long_name)


def _pax_fields(content: bytes) -> dict[bytes, bytes]:
    fields, position = {}, 0
    while position < len(content):
        digits = content[position : position + 20].partition(b" ")[0]
        length = int(digits) if digits.isdigit() else 0
        name, equals, value = content[position + len(digits) + 1 : position + length - 1].partition(b"=")
        if length <= len(digits) + 1 or not equals or position + length > len(content):
            raise ValueError
        fields[name] = value
        position += length
    return fields


def _find_header(content: Content, start: int, *, exclude: int) -> int | None:
    """The offset of the next valid header, at any byte: lost bytes before it shift the 512-byte grid."""
    mark = content.find(b"ustar", start + 257)
    while mark >= 0:
        offset = mark - 257
        if offset != exclude and _checksum_holds(content[offset : offset + BLOCK]):
            return offset
        mark = content.find(b"ustar", mark + 1)
    return None


def _holds_more(content: Content, offset: int) -> bool:
    while block := content[offset : offset + (1 << 16)]:
        if block.count(0) != len(block):
            return True
        offset += len(block)
    return False


def _checksum_holds(header: bytes) -> bool:
    stored = header[148:156].strip(b"\0 ")
    if len(header) != BLOCK or not stored or stored.strip(b"01234567"):
        return False
    return int(stored, 8) == sum(header) - sum(header[148:156]) + 8 * 32


def _length(header: bytes) -> int | None:
    field = header[124:136].strip(b"\0 ")
    return None if not field or field.strip(b"01234567") else int(field, 8)
