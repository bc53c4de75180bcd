# SPDX-License-Identifier: Apache-2.0
"""File lock on the output directory: only one run at a time writes into it.

Rank 0 takes the lock after the process groups are initialized and before metrics, run.json and checkpoints are opened,
so that a second run is refused without a change to the files of the first one. The operating system releases the lock
when the process ends, in any way.
"""

import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from mindvl_train.errors import TrainError

logger = logging.getLogger(__name__)

FILE = "run.lock"
# How long to wait for the previous holder. Killed processes of this machine release the lock within moments; a file
# server keeps the locks of a crashed machine until their lease ends.
_TIMEOUT_S = 5.0
_TIMEOUT_OTHER_HOST_S = 120.0
_POLL_S = 0.2


@contextmanager
def claimed(out: Path) -> Iterator[None]:
    """Hold the lock of an output directory inside the block.

    Raises:
        TrainError: Another run holds the lock, or the directory is not writable.
    """
    path = out / FILE
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
    except OSError as error:
        raise TrainError(f"{path}: is not writable ({error.strerror}). Set `out` to a writable directory.") from error
    with file:
        _lock(file, path)
        yield


def _lock(file: IO[str], path: Path) -> None:
    began = time.monotonic()
    while True:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            holder, is_local = _holder(path)
            if time.monotonic() - began > (_TIMEOUT_S if is_local else _TIMEOUT_OTHER_HOST_S):
                raise TrainError(
                    f"{path.parent}: is locked by another run ({holder}); no file was changed. "
                    "Wait until that run has ended, or set `out` to another directory."
                ) from None
        except OSError as error:
            logger.warning(
                "%s: cannot be locked (%s); a second run in this directory will not be detected", path, error
            )
            return
        time.sleep(_POLL_S)
    holder_record = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    try:
        file.truncate(0)
        file.write(json.dumps(holder_record) + "\n")
        file.flush()
    except OSError as error:  # a full disk: the lock is held without this record
        logger.warning("%s: cannot be written (%s)", path, error)


def _holder(path: Path) -> tuple[str, bool]:
    """Description of the lock holder, and whether it is a process of this machine."""
    try:
        record = json.loads(path.read_text())
        holder = f"process {record['pid']} on {record['host']} since {record['since']}"
        return holder, record["host"] == socket.gethostname()
    except (OSError, ValueError, TypeError, KeyError):  # the record is being written
        return "unknown process", True
