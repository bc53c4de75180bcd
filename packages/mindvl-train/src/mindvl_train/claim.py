# SPDX-License-Identifier: Apache-2.0
"""One run at a time in one directory: the first process claims `out` before anything in it is opened.

Comes after the processes have joined and before metrics, run.json and checkpoints are opened, so that a second start is
refused while the files of the first one are still as they were. The claim is a lock that the system releases when the
process ends, however it ends.
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
# How long a claim waits for the former holder. Processes of this machine that were just killed are gone in a moment;
# a file server keeps the locks of a machine that died for the length of its lease.
_PATIENCE_S = 5.0
_PATIENCE_OTHER_HOST_S = 120.0
_POLL_S = 0.2


@contextmanager
def claimed(out: Path) -> Iterator[None]:
    """Be the only run that writes into a directory, inside the block.

    Raises:
        TrainError: Another run writes there, or the directory cannot be written.
    """
    path = out / FILE
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
    except OSError as error:
        raise TrainError(
            f"{path}: cannot be written ({error.strerror}). Set `out` to a directory that can be written."
        ) from error
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
            holder, is_here = _holder(path)
            if time.monotonic() - began > (_PATIENCE_S if is_here else _PATIENCE_OTHER_HOST_S):
                raise TrainError(
                    f"{path.parent}: is being written by another run ({holder}), and nothing in it was changed. "
                    "Wait until that run has ended, or set `out` to another directory."
                ) from None
        except OSError as error:
            logger.warning("%s: cannot be locked (%s), so a second run on this directory is not noticed", path, error)
            return
        time.sleep(_POLL_S)
    told = {"pid": os.getpid(), "host": socket.gethostname(), "since": datetime.now(UTC).isoformat(timespec="seconds")}
    try:
        file.truncate(0)
        file.write(json.dumps(told) + "\n")
        file.flush()
    except OSError as error:  # a full disk: the lock holds without these words
        logger.warning("%s: cannot be written (%s)", path, error)


def _holder(path: Path) -> tuple[str, bool]:
    """Who holds the lock, in words, and whether it is a process of this machine."""
    try:
        told = json.loads(path.read_text())
        return f"process {told['pid']} on {told['host']} since {told['since']}", told["host"] == socket.gethostname()
    except (OSError, ValueError, TypeError, KeyError):  # it is being written
        return "which process is not known", True
