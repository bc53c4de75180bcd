# SPDX-License-Identifier: Apache-2.0
"""The process that runs parts: `python -m mindvl_data.curation.engine.worker CONNECTION HEARTBEAT MEMORY`.

Started by supervision.py, which sends tasks through the connection. Messages to it: ("read", records), ("done", None),
("refused", message) for an error of ours, ("failed", traceback) for any other error.
"""

import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from mindvl_data.curation.engine.part_run import PartRun
from mindvl_data.curation.engine.tasks import IDLE, Heartbeat
from mindvl_data.errors import DataError

_REPORT_EVERY_S = 0.2
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux
_GIB = 1 << 30


def main() -> None:
    """Run tasks until the supervisor closes the connection or ends."""
    descriptor, heartbeat_descriptor, memory_bytes, parent = map(int, sys.argv[1:5])
    end_with(parent)
    limit_memory(memory_bytes + _GIB)
    connection: Connection[Any, Any] = Connection(descriptor)
    heartbeat = Heartbeat(heartbeat_descriptor)
    resources: dict[Any, Any] = {}
    while True:
        heartbeat.beat(IDLE)
        try:
            task = connection.recv()
        except EOFError:
            return
        try:
            PartRun(task, heartbeat, resources, _Reports(connection)).run()
            message: tuple[str, Any] = ("done", None)
        except DataError as error:
            message = ("refused", str(error))
        except OSError as error:
            where = error.filename or task.segment.directory
            message = ("refused", f"{where}: {error.strerror or error}. Check the disk, and start the command again.")
        except Exception:
            message = ("failed", traceback.format_exc())
        heartbeat.beat(IDLE)
        connection.send(message)


def end_with(parent: int) -> None:
    """End this process when its parent ends, even while a library holds the interpreter."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def limit_memory(num_bytes: int) -> None:
    """Make allocations fail that would take the process over `num_bytes`, so that one call cannot exhaust the machine."""
    import resource

    with suppress(ValueError, OSError):
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        if most == resource.RLIM_INFINITY or num_bytes < most:
            resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, most))


class _Reports:
    """Sends counts of read records, a few times per second."""

    def __init__(self, connection: "Connection[Any, Any]") -> None:
        self._connection = connection
        self._count = 0
        self._last = time.monotonic()

    def __call__(self, num_records: int) -> None:
        self._count += num_records
        now = time.monotonic()
        if now - self._last >= _REPORT_EVERY_S:
            self._connection.send(("read", self._count))
            self._count, self._last = 0, now


if __name__ == "__main__":
    main()
