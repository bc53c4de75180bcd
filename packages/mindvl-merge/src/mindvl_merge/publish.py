# SPDX-License-Identifier: Apache-2.0
"""Replace a directory atomically: a reader finds the old or the new one, always complete.

Comes last in a merge. On Linux renameat2 exchanges the two names in one call. Elsewhere the old directory is renamed
first, and the next start restores it if the process was killed in between.
"""

import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

from .errors import MergeError

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NOT_SUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)
_LOCKS_NOT_SUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


def recover(out: Path) -> None:
    """Restore the old directory if an earlier process was killed between two renames."""
    aside = _aside(out)
    if not aside.exists():
        return
    if out.exists():
        shutil.rmtree(aside, ignore_errors=True)
    else:
        aside.rename(out)


@contextmanager
def partial_directory(
    out: Path, *, keep: Sequence[str] = (), has_progress: Callable[[Path], bool] = lambda path: False
) -> Iterator[Path]:
    """A hidden directory beside `out`, for one process at a time.

    It is removed after a MergeError, which would come again. After an interruption or a failure of the disk it stays if
    `has_progress` says so, and the next call finds the files and directories that match `keep`.

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
            is_ours = error.errno in _LOCKS_NOT_SUPPORTED  # a network file system without locks
        if not is_ours:
            raise MergeError(f"{out}: another merge is writing it. Wait for that merge, or choose another output.")
        for left in partial.iterdir():  # of a killed process
            if not left.is_symlink() and any(fnmatchcase(left.name, pattern) for pattern in keep):
                continue
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left)
            else:
                left.unlink()
        try:
            yield partial
        except BaseException as error:
            is_lost = isinstance(error, MergeError) or not has_progress(partial)
            if is_lost and _is_open_as(descriptor, partial):
                shutil.rmtree(partial, ignore_errors=True)
            raise
    finally:
        os.close(descriptor)


def replace_directory(partial: Path, out: Path) -> None:
    """Rename the finished directory to `out`, and then remove the previous directory."""
    for parent, _, names in os.walk(partial):
        for name in names:
            _sync(Path(parent) / name)
        _sync(Path(parent))
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
    """Whether the path is still the opened directory."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _exchange(one: Path, two: Path) -> bool:
    """Exchange two names atomically; False if system or file system do not support it."""
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
