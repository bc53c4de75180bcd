# SPDX-License-Identifier: Apache-2.0
"""A lock that allows one writer at a time in a directory of shards; two writers would overwrite each other's files.

Held by indexing.py and write.py during the whole operation. The lock is released when its process ends in any way.
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
    """Hold the lock of a directory.

    Raises:
        DataError: Another process holds it.
        OSError: The lock file cannot be created.
    """
    path = directory / CLAIM_NAME
    descriptor = _open_locked(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # before the lock is released, so that no other process can have locked this file
        os.close(descriptor)


def _open_locked(path: Path) -> int:
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except PermissionError:  # left by a killed process of another user; a read-only descriptor can be locked too
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if _lock(descriptor, path):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> bool:
    """Try to lock the file; returns False if the process that held it has just removed it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        owner = os.pread(descriptor, 200, 0).decode("utf-8", "replace") or "another process"
        raise DataError(
            f"{path.parent}: {owner} is writing or indexing shards in this directory. Wait until it ends, then try again."
        ) from error
    except OSError:
        return True  # some network file systems have no locks; then the directory is used without one
    try:
        if os.fstat(descriptor).st_ino != os.stat(path).st_ino:
            return False
    except FileNotFoundError:
        return False
    with suppress(OSError):  # the owner is only needed for the message above
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return True
