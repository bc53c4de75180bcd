# SPDX-License-Identifier: Apache-2.0
"""An append-only file of JSON lines, extended only by complete lines.

Used by the audit log and the quarantine log. A line that cannot be written is removed again, so that it can be written
later when there is room.
"""

import fcntl
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from mindvl_data.errors import DataError
from mindvl_data.log_parts import sync_directory


class LogFile:
    """Opens or creates the file.

    Args:
        kind: Name of the log in errors and of its setting: "audit" is `data.audit_log`.

    Raises:
        DataError: The file cannot be written; also raised by every method.
    """

    def __init__(self, path: Path, kind: str) -> None:
        self.path = path
        self._kind = kind
        self._torn_at: int | None = None  # offset of a line that may be incomplete
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Unbuffered: a buffer would write the rest of a failed write a second time.
            self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise self._unwritable(error) from error

    def fileno(self) -> int:
        """The file descriptor, for mmap."""
        return self._file.fileno()

    def head(self, num_bytes: int) -> bytes:
        """At most `num_bytes` from the beginning of the file."""
        return os.pread(self.fileno(), min(num_bytes, self.size()), 0)  # reading a device to its end would not return

    def size(self) -> int:
        """Size of the file in bytes."""
        return os.fstat(self.fileno()).st_size

    def lock(self) -> None:
        """Lock the file for writing until it is closed or the process ends.

        Raises:
            DataError: Another process holds the lock.
        """
        try:
            fcntl.flock(self.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(self.fileno()), os.stat(self.path)):
                raise BlockingIOError  # another file replaced it since it was opened
        except BlockingIOError as error:
            raise DataError(
                f"{self.path}: the {self._kind} log is being written by another loader. "
                f"End that run, or set another data.{self._kind}_log."
            ) from error
        except OSError:
            return  # some network file systems have no locks; the run continues without one

    def append(self, line: dict[str, Any]) -> None:
        """Write one line completely, or nothing."""
        content = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        try:
            self._cut_torn()
            self._torn_at = self.size()
            while content:
                content = content[self._file.write(content) :]
            self._torn_at = None
        except OSError as error:
            with suppress(OSError):  # retried before the next line
                self._cut_torn()
            raise self._unwritable(error) from error

    def end_line(self) -> None:
        """Terminate a last line that was truncated by a kill."""
        size = self.size()
        try:
            if size and os.pread(self.fileno(), 1, size - 1) != b"\n":
                self._file.write(b"\n")
        except OSError as error:
            raise self._unwritable(error) from error

    def cut(self, size: int) -> None:
        """Truncate the file to `size` bytes."""
        try:
            if size < self.size():
                self._file.truncate(size)
        except OSError as error:
            raise self._unwritable(error) from error

    def replace(self, unfinished: Path, content: Iterable[bytes], *, keep_as: Path | None = None) -> None:
        """Replace this file atomically by a new file, which is locked from its creation on.

        Args:
            unfinished: Name of the new file until it is complete.
            keep_as: New name of the old file; None: it is removed.
        """
        try:
            self.sync()
            unfinished.unlink(missing_ok=True)
            file = open(unfinished, "a+b", buffering=0)  # noqa: SIM115 - closed by close()
            try:
                with suppress(OSError):  # some network file systems have no locks
                    fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                for piece in content:
                    rest = memoryview(piece)
                    while rest:
                        rest = rest[file.write(rest) :]
                os.fsync(file.fileno())
                if keep_as is not None:
                    os.rename(self.path, keep_as)
                os.replace(unfinished, self.path)
            except BaseException:
                file.close()
                if keep_as is not None and not self.path.exists() and keep_as.exists():
                    os.rename(keep_as, self.path)
                raise
        except OSError as error:
            raise self._unwritable(error) from error
        self._file.close()
        self._file, self._torn_at = file, None
        with suppress(OSError):
            sync_directory(self.path.parent)

    def sync(self) -> None:
        """Write the file to disk (fsync)."""
        try:
            os.fsync(self.fileno())
        except OSError as error:
            raise self._unwritable(error) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _cut_torn(self) -> None:
        if self._torn_at is not None and self._torn_at < self.size():
            self._file.truncate(self._torn_at)
        self._torn_at = None

    def _unwritable(self, error: OSError) -> DataError:
        return DataError(
            f"{self.path}: the {self._kind} log cannot be written: {error.strerror}. "
            f"Free disk space, or set another data.{self._kind}_log."
        )
