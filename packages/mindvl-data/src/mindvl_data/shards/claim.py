# SPDX-License-Identifier: Apache-2.0
"""One writer at a time in a directory of shards: two would overwrite what the other has just written.

Used by indexing.py and write.py around all they do. The claim ends with its process, however that ends.
"""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mindvl_data.errors import DataError

CLAIM_NAME = ".claimed"  # locked while a process writes into the directory; removed when it is done


@contextmanager
def claimed(directory: Path) -> Iterator[None]:
    """Be the only process that writes into a directory.

    Raises:
        DataError: Another process is.
        OSError: Nothing can be written into the directory.
    """
    path = directory / CLAIM_NAME
    descriptor = _open_locked(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # before the lock goes, so that nobody has locked it meanwhile
        os.close(descriptor)


def _open_locked(path: Path) -> int:
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except PermissionError:  # left behind by another user, whose process was killed; it can be locked all the same
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if _lock(descriptor, path):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> bool:
    """Whether the file is locked now; False where the process that held it has just removed it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        owner = os.pread(descriptor, 200, 0).decode("utf-8", "replace") or "another process"
        raise DataError(
            f"{path.parent}: {owner} is writing or indexing shards here. Wait until it has ended, then start again."
        ) from error
    except OSError:
        return True  # some network file systems have no locks; the work is worth more than this check
    try:
        if os.fstat(descriptor).st_ino != os.stat(path).st_ino:
            return False
    except FileNotFoundError:
        return False
    with suppress(OSError):  # the lock holds without these words
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return True
