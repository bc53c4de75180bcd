# SPDX-License-Identifier: Apache-2.0
"""Tar shards: member names, and a writer whose output depends only on its input.

Comes after the input formats, before scan.py, which reads shards. Format: POSIX ustar in the WebDataset convention
(members whose names agree up to the first dot are one sample).
"""

from dataclasses import dataclass

from mindvl_data.errors import DataError
from mindvl_data.shards.atomic import AtomicFile

BLOCK = 512
TEXT_EXTENSIONS = ("txt", "text", "caption")
RECORD_EXTENSIONS = ("json", *TEXT_EXTENSIONS)
IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "avif")
VIDEO_EXTENSIONS = ("mp4", "mov", "mkv", "webm", "avi")
MEDIA_EXTENSIONS = (*IMAGE_EXTENSIONS, *VIDEO_EXTENSIONS)
MAX_MEMBER_BYTES = 1 << 30
SHARD_PATTERN = "*.tar"
WRITING_MARK = "writing"  # this file exists in a directory until its last shard is written
EXCLUDED_NAME = "excluded.jsonl"  # excluded samples with reasons, from writing and indexing


def shard_name(number: int) -> str:
    """File name of a shard."""
    return f"shard-{number:06d}.tar"


@dataclass(frozen=True, kw_only=True)
class Member:
    """One file of a shard; `offset` and `length` refer to its content."""

    name: str
    offset: int
    length: int

    @property
    def key(self) -> str:
        return split_name(self.name)[0]

    @property
    def extension(self) -> str:
        return self.name.rsplit(".", 1)[-1].lower()


def split_name(name: str) -> tuple[str, str]:
    """Split a member name at the first dot after the last slash, as webdataset does; returns (key, rest)."""
    directory, slash, base = name.rpartition("/")
    stem, _, rest = base.partition(".")
    return directory + slash + stem, rest


def name_in_header(header: bytes) -> str:
    """The member name in a tar header of 512 bytes."""
    name, prefix = header[:100].split(b"\0", 1)[0], b""
    if header[257:263] == b"ustar\0":  # the older GNU format stores times in the prefix field
        prefix = header[345:500].split(b"\0", 1)[0]
    return (prefix + b"/" + name if prefix else name).decode("utf-8", "replace")


class ShardWriter(AtomicFile):
    """Writes one tar, which gets its name when it is complete."""

    def add(self, name: str, content: bytes) -> None:
        """Append one member."""
        self.write(tar_header(name, len(content)))
        self.write(content)
        self.write(bytes(-len(content) % BLOCK))

    def commit(self) -> None:
        """Finish the archive, flush it to disk and rename it."""
        self.write(bytes(2 * BLOCK))
        super().commit()


def tar_header(name: str, length: int) -> bytes:
    """The ustar header of a regular file with mode 0644, owner 0 and time 0."""
    encoded = name.encode("ascii")
    if len(encoded) > 100:
        raise DataError(
            f"member name {name!r}: {len(encoded)} characters are over the limit of 100. Use keys of at most 90."
        )
    head = encoded.ljust(100, b"\0") + b"0000644\x000000000\x000000000\x00%011o\x0000000000000\x00" % length
    tail = b"0" + bytes(100) + b"ustar\x0000" + bytes(247)
    checksum = sum(head) + 8 * 32 + sum(tail)
    return head + b"%06o\x00 " % checksum + tail
