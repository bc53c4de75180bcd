# SPDX-License-Identifier: Apache-2.0
"""Walk over the headers of a shard without trust; after damage, go on at the next sound header.

Comes before validation. Reads POSIX ustar, GNU and pax headers, as tar, Python and webdataset write them. Nothing is
ever extracted to disk or unpickled.
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
_EXTENSIONS = (b"x", b"g", b"L", b"K")  # say something of the next header, or of all


@dataclass(frozen=True, kw_only=True)
class Damage:
    """A place of a shard that holds no usable member."""

    what: str
    offset: int  # of the header
    remedy: str = "Write or copy the shard again."
    key: str | None = None  # the sample it belongs to; None: unknown, so samples on both sides may lack something

    def error(self, path: Path) -> DataError:
        """What is raised where damage is not left out."""
        return DataError(f"{self.what}. {path} at byte {self.offset}. {self.remedy}")


@contextmanager
def map_shard(path: Path) -> Iterator[Content]:
    """The bytes of a shard, mapped into memory."""
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed below; opening alone is what may fail here
    except OSError as error:
        raise DataError(f"shard cannot be read: {error.strerror}. {path}. Check its rights.") from error
    with file:
        if os.fstat(file.fileno()).st_size == 0:
            yield b""
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            yield content


def scan_members(path: Path) -> Iterator[Member]:
    """The members of a shard.

    Raises:
        DataError: A header is damaged, the file ends early, or a member is something other than a plain file with a
            safe name. The message names file and offset.
    """
    with map_shard(path) as content:
        for found in walk(content):
            if isinstance(found, Damage):
                raise found.error(path)
            yield found


def walk(content: Content) -> Iterator[Member | Damage]:
    """Members and damaged places of a shard, in order."""
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
        # a member that was cut short hides the next header inside its own span, so the search begins there
        found = _find_header(content, step.next if last is None else min(step.next, last.offset), not_at=offset)
        if last is not None and found is not None and (found < offset or (found - offset) % BLOCK):
            yield Damage(
                what=f"member {last.name!r} has lost or gained bytes", offset=last.offset - BLOCK, key=last.key
            )
        if found is None:
            return
        offset, last = found, None


@dataclass(frozen=True, kw_only=True)
class _Step:
    """What stands at one offset, and where to look next."""

    found: Member | Damage | None = None
    next: int = 0
    long_name: str | None = None
    is_lost: bool = False  # where the next header stands is not known
    is_end: bool = False


def _step(content: Content, offset: int, long_name: str | None) -> _Step:
    header = content[offset : offset + BLOCK]
    if len(header) < BLOCK:
        return _lost("truncated shard: no end mark", offset)
    if not any(header):
        if not _holds_more(content, offset + BLOCK):
            return _Step(is_end=True)
        joined = "data after the end mark: a header before it was wiped, or two archives were joined"
        return _lost(joined, offset)
    if not _checksum_holds(header):
        return _lost("damaged tar header: its checksum is wrong", offset)
    kind, name, length = header[156:157], long_name or name_in_header(header), _length(header)
    body = offset + BLOCK
    if kind in _BODILESS:
        length = 0
    if length is None:
        return _lost(f"member {name!r} has no readable size", offset)
    if body + length > len(content):
        there = f"{length} bytes, {len(content) - body} are there"
        what = f"truncated shard: member {name!r} has {there}; what came after it is lost too"
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
    """Why a member with a sound header is not used."""
    what, remedy = "", ""
    if kind not in _PLAIN:
        what = f"member {name!r} is not a plain file (type {kind!r})"
        remedy = "Shards hold plain files only: no links or devices."
    elif name.startswith("/") or ".." in name.split("/") or not name:
        what, remedy = f"member name {name!r} leaves the archive", "Rename the member."
    elif length > MAX_MEMBER_BYTES:
        what, remedy = f"member {name!r} has {length} bytes, more than {MAX_MEMBER_BYTES}", "Leave it out."
    return Damage(what=what, offset=offset, remedy=remedy, key=split_name(name)[0]) if what else None


def _extension(kind: bytes, content: bytes, offset: int, following: int, long_name: str | None) -> _Step:
    """Headers that carry a longer name for the next one; times and owners do not matter."""
    if kind == b"L":
        return _Step(next=following, long_name=content.split(b"\0", 1)[0].decode("utf-8", "replace"))
    if kind == b"K":
        return _Step(next=following, long_name=long_name)
    try:
        fields = _pax_fields(content)
    except ValueError:
        return _lost("extended header cannot be read", offset)
    bad = [name for name in fields if name == b"size" or name.startswith(b"GNU.sparse")]
    if bad or (kind == b"g" and b"path" in fields):
        what = f"extended header sets {(bad or [b'path'])[0].decode('ascii', 'replace')}"
        remedy = "Write the shard again, with members of at most 1 GiB."
        return _Step(found=Damage(what=what, offset=offset, remedy=remedy), next=following)
    name = fields.get(b"path", b"").decode("utf-8", "replace")
    return _Step(next=following, long_name=name or long_name)


def _pax_fields(content: bytes) -> dict[bytes, bytes]:
    fields, place = {}, 0
    while place < len(content):
        digits = content[place : place + 20].partition(b" ")[0]
        length = int(digits) if digits.isdigit() else 0
        name, equals, value = content[place + len(digits) + 1 : place + length - 1].partition(b"=")
        if length <= len(digits) + 1 or not equals or place + length > len(content):
            raise ValueError
        fields[name] = value
        place += length
    return fields


def _find_header(content: Content, start: int, *, not_at: int) -> int | None:
    """The next sound header, which need not stand at a multiple of 512: bytes may be missing before it."""
    mark = content.find(b"ustar", start + 257)
    while mark >= 0:
        offset = mark - 257
        if offset != not_at and _checksum_holds(content[offset : offset + BLOCK]):
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
