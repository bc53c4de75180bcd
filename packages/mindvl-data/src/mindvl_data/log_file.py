# SPDX-License-Identifier: Apache-2.0
"""A file of JSON lines that is only ever extended by whole lines.

Below the audit log and the quarantine log. A line that could not be written is cut off again, so the same line can be
tried once more when there is room.
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
    """Opens or makes the file.

    Args:
        kind: What errors call it, and the setting that names it: "audit" is `data.audit_log`.

    Raises:
        DataError: Here and in every method: the file cannot be written.
    """

    def __init__(self, path: Path, kind: str) -> None:
        self.path = path
        self._kind = kind
        self._torn_at: int | None = None  # where a line begins that was perhaps not written to its end
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Without a buffer: what it held of a failed write would be written a second time.
            self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise self._unwritable(error) from error

    def fileno(self) -> int:
        """The file's descriptor, to be mapped."""
        return self._file.fileno()

    def head(self, num_bytes: int) -> bytes:
        """The first bytes of the file, as far as it has them."""
        return os.pread(self.fileno(), min(num_bytes, self.size()), 0)  # a device has no size, but no end either

    def size(self) -> int:
        """Bytes in the file."""
        return os.fstat(self.fileno()).st_size

    def lock(self) -> None:
        """Be the only one that writes, until it is closed or the process ends.

        Raises:
            DataError: Somebody else is.
        """
        try:
            fcntl.flock(self.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(self.fileno()), os.stat(self.path)):
                raise BlockingIOError  # somebody put another file in its place since it was opened
        except BlockingIOError as error:
            raise DataError(
                f"{self._kind} log is being written by another loader. {self.path}. "
                f"End that run, or name another data.{self._kind}_log."
            ) from error
        except OSError:
            return  # some network file systems have no locks; a run is worth more than this check

    def append(self, line: dict[str, Any]) -> None:
        """Write one line, or nothing."""
        content = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        try:
            self._cut_torn()
            self._torn_at = self.size()
            while content:
                content = content[self._file.write(content) :]
            self._torn_at = None
        except OSError as error:
            with suppress(OSError):  # if not now, then before the next line
                self._cut_torn()
            raise self._unwritable(error) from error

    def end_line(self) -> None:
        """Have a last line that a kill cut off stay alone."""
        size = self.size()
        try:
            if size and os.pread(self.fileno(), 1, size - 1) != b"\n":
                self._file.write(b"\n")
        except OSError as error:
            raise self._unwritable(error) from error

    def cut(self, size: int) -> None:
        """Drop everything from this byte on."""
        try:
            if size < self.size():
                self._file.truncate(size)
        except OSError as error:
            raise self._unwritable(error) from error

    def replace(self, unfinished: Path, content: Iterable[bytes], *, keep_as: Path | None = None) -> None:
        """Put a new file in place of this one, whole or not at all; it is locked from its first moment on.

        Args:
            unfinished: What the new file is called until it is whole.
            keep_as: The new name of the file as it was; None: it is removed.
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
        """Have it on disk."""
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
            f"{self._kind} log cannot be written: {error.strerror}. {self.path}. "
            f"Make room there, or name another data.{self._kind}_log."
        )
