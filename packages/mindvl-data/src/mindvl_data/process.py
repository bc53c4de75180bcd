# SPDX-License-Identifier: Apache-2.0
"""Refuse the use of objects in a forked process, and end the processes of a pool with their parent.

A forked process has only the calling thread: a lock held by another thread is never released there, and jobs submitted
to a thread are never run. Without the check such a process would hang.
"""

import multiprocessing
import os
import threading

from mindvl_data.errors import DataError


class OwnProcess:
    """The process in which an object was created.

    Args:
        what: Name of the object in errors, such as "Loader".
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._pid = os.getpid()

    @property
    def is_current(self) -> bool:
        """Whether the calling process is this process and not a fork of it."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Refuse the use in another process.

        Raises:
            DataError: The calling process is a fork.
        """
        if not self.is_current:
            raise DataError(
                f"{self._what}: was created in process {self._pid} and is used in the forked process {os.getpid()}, where "
                "its threads, locks and files do not work. Create it in the process that uses it, use the start method "
                "`spawn`, or use PackedDataset in DataLoader workers."
            )


def end_with_parent() -> None:
    """Initializer of a pool's processes: exit when the parent was killed instead of waiting for work forever."""
    parent = multiprocessing.parent_process()

    def wait() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
