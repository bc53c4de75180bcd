# SPDX-License-Identifier: Apache-2.0
"""A new directory takes the place of an old one: whoever looks finds the old one or the new one, each of them whole.

Comes last in a merge. Where the kernel can exchange two names in one call (Linux, renameat2), it does. Elsewhere the
old directory is put aside for a moment, and the next start brings it back if the process ended in that moment.
"""

import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import MergeError

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NOT_SUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)
_LOCKS_NOT_SUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


def recover(out: Path) -> None:
    """Undo what an earlier process left half done when it ended between two renames."""
    aside = _aside(out)
    if not aside.exists():
        return
    if out.exists():
        shutil.rmtree(aside, ignore_errors=True)
    else:
        aside.rename(out)


@contextmanager
def partial_directory(out: Path) -> Iterator[Path]:
    """An empty hidden directory beside `out`, for one process at a time; removed at the end if it is still there.

    Raises:
        MergeError: Another process writes there.
    """
    partial = out.parent / f".{out.name}.partial"
    partial.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(partial, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = _is_open_as(descriptor, partial)
        except BlockingIOError:
            is_ours = False
        except OSError as error:
            is_ours = error.errno in _LOCKS_NOT_SUPPORTED  # a network file system: nobody can be asked
        if not is_ours:
            raise MergeError(f"{out}: another merge is writing it. Wait for it, or choose another output.")
        for left in partial.iterdir():  # by a process that was killed
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
        try:
            yield partial
        finally:
            if _is_open_as(descriptor, partial):
                shutil.rmtree(partial, ignore_errors=True)
    finally:
        os.close(descriptor)


def put_in_place(partial: Path, out: Path) -> None:
    """Give the finished directory its name; what had the name before is removed afterwards."""
    for place, _, names in os.walk(partial):
        for name in names:
            _sync(Path(place) / name)
        _sync(Path(place))
    if not out.exists():
        partial.rename(out)
        _sync(out.parent)
        return
    aside = _aside(out)
    if _exchange(partial, out):
        partial.rename(aside)
    else:
        out.rename(aside)
        partial.rename(out)
    _sync(out.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _aside(out: Path) -> Path:
    return out.parent / f".{out.name}.old"


def _is_open_as(descriptor: int, path: Path) -> bool:
    """Whether the name still belongs to the directory that was opened."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _exchange(one: Path, two: Path) -> bool:
    """Exchange two names at once; False where system or file system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    result = renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(two), _RENAME_EXCHANGE)
    if result == 0:
        return True
    number = ctypes.get_errno()
    if number in _NOT_SUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(two))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
