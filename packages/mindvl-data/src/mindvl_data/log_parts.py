# SPDX-License-Identifier: Apache-2.0
"""The files of a log without a size limit: closed, compressed parts and the file that is written.

Between log_file.py and the audit log. `audit.jsonl` is the newest part. When it is large it is renamed to
`audit.000001.jsonl`, which a thread compresses to `audit.000001.jsonl.gz`, and a new `audit.jsonl` begins with a header
that gives the number of closed parts before it. After a kill at any moment `log_files` restores the order of the files:

- between the two renames of a rotation the new file is still called `audit.jsonl.next`;
- a return to a step in a closed part first replaces `audit.jsonl` by the beginning of that part, then removes the
  closed parts from the newest down. If the header counts fewer parts than exist, the removal was interrupted: the
  closed parts still hold all lines of the file.
"""

import gzip
import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from mindvl_data.errors import DataError

logger = logging.getLogger(__name__)

PART_BYTES = 16 << 20  # uncompressed size at which a part is closed: about half a million samples
MAX_LINE_BYTES = 32 << 20  # a longer line is damaged; a step of a million samples has this size
_HEADER = re.compile(rb'\{"step":\d{1,18},"part":(\d{1,6})[,}]')
_HEADER_BYTES = 64


def part_path(log: Path, number: int) -> Path:
    """Path of a closed part before compression; compression adds `.gz`."""
    return log.with_name(f"{log.stem}.{number:06d}{log.suffix}")


def next_path(log: Path) -> Path:
    """Path of the new file during a rotation, before it is renamed to the log."""
    return log.with_name(f"{log.name}.next")


def closed_parts(log: Path) -> list[Path]:
    """The closed parts, oldest first; the compressed file of a part as soon as it is complete.

    Raises:
        DataError: A part between two others is missing.
    """
    name = re.compile(re.escape(log.stem) + r"\.(\d{6})" + re.escape(log.suffix) + r"(\.gz)?")
    found: dict[int, Path] = {}
    try:
        entries = sorted(os.listdir(log.parent))  # the compressed file sorts after the uncompressed one
    except OSError:
        entries = []
    for entry in entries:
        if match := name.fullmatch(entry):
            found[int(match[1])] = log.with_name(entry)
    for number in range(1, len(found) + 1):
        if number not in found:
            raise DataError(
                f"{part_path(log, number)}.gz: this part of the log is missing, although part {max(found)} exists. "
                "Restore it from a copy."
            )
    return [found[number] for number in sorted(found)]


def log_files(log: Path) -> list[Path]:
    """The files of a log in the order of their lines; the last file can end in a truncated line.

    Raises:
        DataError: The log or a part of it does not exist.
    """
    closed = closed_parts(log)
    for number, path in enumerate(closed):
        if header_number(_first_line(path)) != number:
            raise DataError(
                f"{path}:1: the header of part {number + 1} of the log is missing. Restore the file from a copy."
            )
    newest = log
    if closed and not log.exists() and next_path(log).exists():
        newest = next_path(log)  # killed between the two renames
    try:
        first = _first_line(newest)
    except FileNotFoundError:
        what = f"is missing, although {len(closed)} closed parts of it exist" if closed else "does not exist"
        raise DataError(f"{log}: the audit log {what}. Restore it, or pass the directory or log of a run.") from None
    number = header_number(first)
    if number == len(closed):
        return [*closed, newest]
    if number > len(closed):
        missing = part_path(log, len(closed) + 1)
        raise DataError(
            f"{missing}.gz: this part of the log is missing, and {newest} follows part {number}. Restore it from a copy."
        )
    if _is_empty_log(first) or first == _first_line(closed[number]):
        return closed  # killed while returning to an earlier step
    raise DataError(
        f"{newest}:1: the file does not follow part {len(closed)}, the newest part of the log. Restore it from a copy."
    )


def header_number(first_line: bytes) -> int:
    """Number of closed parts before a file that begins with this line."""
    found = _HEADER.match(first_line[:_HEADER_BYTES])
    return int(found[1]) if found else 0


def lines_of(path: Path, *, may_be_cut_off: bool) -> Iterator[tuple[int, bytes]]:
    """Yield (number, text) of the lines of one file, with bounded memory.

    Args:
        may_be_cut_off: Whether to ignore an incomplete last line, as in a file that is being written.

    Raises:
        DataError: The file cannot be read or is damaged.
    """
    number = 0
    try:
        with open_part(path) as file:
            while text := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if not text.endswith(b"\n"):
                    if may_be_cut_off and len(text) <= MAX_LINE_BYTES:
                        return
                    raise DataError(
                        f"{path}:{number}: the line does not end after {len(text)} bytes. Restore the file from a copy."
                    )
                yield number, text
        if not number and not may_be_cut_off:
            raise DataError(f"{path}:1: the file is empty. Restore it from a copy.")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}:{number + 1}: decompression failed: {error}. Restore the file from a copy.") from error
    except OSError as error:
        raise DataError(f"{path}: the file cannot be read: {error.strerror}. Restore it from a copy.") from error


def open_part(path: Path) -> IO[bytes]:
    """Open a part for reading, compressed or not, also if it is compressed at this moment."""
    if path.suffix != ".gz":
        try:
            return open(path, "rb")
        except FileNotFoundError:
            path = path.with_name(f"{path.name}.gz")
    return cast(IO[bytes], gzip.open(path, "rb"))


def compress_closed(log: Path) -> None:
    """Compress the closed parts that are not compressed; each is removed after its compressed file is on disk."""
    try:
        for path in closed_parts(log):
            compressed = path.with_name(f"{path.name}.gz")
            if path.suffix == ".gz":
                part_path(log, int(path.name.rsplit(".", 3)[-3])).unlink(missing_ok=True)  # left by a kill
                continue
            unfinished = path.with_name(f"{path.name}.gz.tmp")
            with open(path, "rb") as plain, open(unfinished, "wb") as file:
                with gzip.GzipFile(fileobj=file, mode="wb", compresslevel=6, mtime=0, filename="") as archive:
                    shutil.copyfileobj(plain, archive, 1 << 20)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, compressed)
            sync_directory(log.parent)
            path.unlink()
    except (OSError, DataError) as error:  # the uncompressed part can still be read
        logger.warning("%s: a closed part could not be compressed (%s). The log is complete.", log, error)


def remove_closed(log: Path, first: int) -> None:
    """Remove closed parts from this number on, the newest first.

    Raises:
        OSError: A part cannot be removed.
    """
    for number in range(len(closed_parts(log)), first - 1, -1):
        part_path(log, number).unlink(missing_ok=True)
        part_path(log, number).with_name(f"{part_path(log, number).name}.gz").unlink(missing_ok=True)
    sync_directory(log.parent)


def sync_directory(path: Path) -> None:
    """Write the entries of a directory to disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def empty_log_line() -> bytes:
    """The header of a log that was truncated to nothing while it had closed parts."""
    return json.dumps({"step": 0, "part": 0}, separators=(",", ":")).encode() + b"\n"


def _is_empty_log(first_line: bytes) -> bool:
    return first_line == empty_log_line()


def _first_line(path: Path) -> bytes:
    try:
        with open_part(path) as file:
            return file.readline(MAX_LINE_BYTES)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}:1: decompression failed: {error}. Restore the file from a copy.") from error
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DataError(f"{path}: the file cannot be read: {error.strerror}. Restore it from a copy.") from error


def as_line(document: dict[str, Any]) -> bytes:
    """One line of JSON."""
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"
