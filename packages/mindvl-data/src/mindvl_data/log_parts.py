# SPDX-License-Identifier: Apache-2.0
"""The files of a log that grows without end: closed, compressed parts and the file that is written.

Between log_file.py and the audit log. `audit.jsonl` is the newest part; when it is large it becomes
`audit.000001.jsonl`, which a thread compresses to `audit.000001.jsonl.gz`, and a new `audit.jsonl` begins with a header
that says how many closed parts come before it. A kill at any moment leaves files that `log_files` puts in order:

- between the two renames of a rotation the new file is still called `audit.jsonl.next`;
- going back to a step of a closed part first puts the beginning of that part in place of `audit.jsonl`, then removes
  the closed parts from the newest one down. A header that counts fewer parts than there are marks such a file: the
  closed parts still hold all of it.
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

PART_BYTES = 16 << 20  # of a part before it is closed, uncompressed: about half a million samples
MAX_LINE_BYTES = 32 << 20  # a longer line is damage; a step of a million samples has this much
_HEADER = re.compile(rb'\{"step":\d{1,18},"part":(\d{1,6})[,}]')
_HEADER_BYTES = 64


def part_path(log: Path, number: int) -> Path:
    """Where a closed part lies before it is compressed; afterwards `.gz` is added."""
    return log.with_name(f"{log.stem}.{number:06d}{log.suffix}")


def next_path(log: Path) -> Path:
    """The new file of a rotation until it gets the name of the log."""
    return log.with_name(f"{log.name}.next")


def closed_parts(log: Path) -> list[Path]:
    """The closed parts, oldest first; of one that is being compressed, the compressed file once it is whole.

    Raises:
        DataError: One is missing between others.
    """
    name = re.compile(re.escape(log.stem) + r"\.(\d{6})" + re.escape(log.suffix) + r"(\.gz)?")
    found: dict[int, Path] = {}
    try:
        entries = sorted(os.listdir(log.parent))  # the compressed one comes after the other
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
    """The files that hold the lines of a log, in order; the last one can end in a line that is cut off.

    Raises:
        DataError: There is no such log, or a part of it is missing.
    """
    closed = closed_parts(log)
    for number, path in enumerate(closed):
        if header_number(_first_line(path)) != number:
            raise DataError(
                f"{path}:1: does not begin with the header of part {number + 1} of the log. Restore it from a copy."
            )
    newest = log
    if closed and not log.exists() and next_path(log).exists():
        newest = next_path(log)  # killed between the two renames
    try:
        first = _first_line(newest)
    except FileNotFoundError:
        what = f"is missing, although {len(closed)} closed parts of it exist" if closed else "No such file or directory"
        raise DataError(f"{log}: audit log: {what}. Restore it, or name the directory or log of a run.") from None
    number = header_number(first)
    if number == len(closed):
        return [*closed, newest]
    if number > len(closed):
        missing = part_path(log, len(closed) + 1)
        raise DataError(f"{missing}.gz: this part of the log is missing: {newest} follows part {number}. Restore it.")
    if _is_empty_log(first) or first == _first_line(closed[number]):
        return closed  # killed while going back to an earlier step
    raise DataError(
        f"{newest}:1: does not follow part {len(closed)} of the log, which is the newest. Restore it from a copy."
    )


def header_number(first_line: bytes) -> int:
    """How many closed parts come before a file that begins with this line."""
    found = _HEADER.match(first_line[:_HEADER_BYTES])
    return int(found[1]) if found else 0


def lines_of(path: Path, *, may_be_cut_off: bool) -> Iterator[tuple[int, bytes]]:
    """(number, text) of the lines of one file, with bounded memory.

    Args:
        may_be_cut_off: Whether a last line without its end is passed over, as in a file that is being written.

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
                        f"{path}:{number}: the line has no end after {len(text)} bytes. Restore the file from a copy."
                    )
                yield number, text
        if not number and not may_be_cut_off:
            raise DataError(f"{path}:1: the file is empty. Restore it from a copy.")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}:{number + 1}: cannot be decompressed ({error}). Restore it from a copy.") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}). Check the disk, or restore it.") from error


def open_part(path: Path) -> IO[bytes]:
    """A part to read, whether it is compressed or was compressed a moment ago."""
    if path.suffix != ".gz":
        try:
            return open(path, "rb")
        except FileNotFoundError:
            path = path.with_name(f"{path.name}.gz")
    return cast(IO[bytes], gzip.open(path, "rb"))


def compress_closed(log: Path) -> None:
    """Compress the closed parts that are not; each is replaced only when its compressed file is on disk."""
    try:
        for path in closed_parts(log):
            whole = path.with_name(f"{path.name}.gz")
            if path.suffix == ".gz":
                part_path(log, int(path.name.rsplit(".", 3)[-3])).unlink(missing_ok=True)  # killed in between
                continue
            unfinished = path.with_name(f"{path.name}.gz.tmp")
            with open(path, "rb") as plain, open(unfinished, "wb") as file:
                with gzip.GzipFile(fileobj=file, mode="wb", compresslevel=6, mtime=0, filename="") as packed:
                    shutil.copyfileobj(plain, packed, 1 << 20)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, whole)
            sync_directory(log.parent)
            path.unlink()
    except (OSError, DataError) as error:  # the part stays as it is, and can be read
        logger.warning("%s: a closed part could not be compressed (%s); the log is whole", log, error)


def remove_closed(log: Path, first: int) -> None:
    """Remove closed parts from this number on, the newest first.

    Raises:
        OSError: One cannot be removed.
    """
    for number in range(len(closed_parts(log)), first - 1, -1):
        part_path(log, number).unlink(missing_ok=True)
        part_path(log, number).with_name(f"{part_path(log, number).name}.gz").unlink(missing_ok=True)
    sync_directory(log.parent)


def sync_directory(path: Path) -> None:
    """Have the names in a directory on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def empty_log_line() -> bytes:
    """The header of a log that was emptied while it had closed parts."""
    return json.dumps({"step": 0, "part": 0}, separators=(",", ":")).encode() + b"\n"


def _is_empty_log(first_line: bytes) -> bool:
    return first_line == empty_log_line()


def _first_line(path: Path) -> bytes:
    try:
        with open_part(path) as file:
            return file.readline(MAX_LINE_BYTES)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}:1: cannot be decompressed ({error}). Restore it from a copy.") from error
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}). Check the disk, or restore it.") from error


def as_line(document: dict[str, Any]) -> bytes:
    """One line of JSON."""
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"
