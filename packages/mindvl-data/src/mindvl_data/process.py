# SPDX-License-Identifier: Apache-2.0
"""A check of the process id, for objects whose threads, locks and open files a fork leaves behind; the end of pools.

Below everything that holds such things. Only the calling thread exists in a forked process: a lock that another thread
held is never released there, and work given to a thread is never done. Without the check such a process hangs silently.
"""

import multiprocessing
import os
import threading

from mindvl_data.errors import DataError


class OwnProcess:
    """Remembers the process in which an object was made.

    Args:
        what: What errors call the object, such as "Loader".
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._pid = os.getpid()

    @property
    def is_current(self) -> bool:
        """Whether this is the process, and not a fork of it."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Refuse to be used in a fork.

        Raises:
            DataError: This is another process.
        """
        if not self.is_current:
            raise DataError(
                f"{self._what}: was made in process {self._pid} and is used in its fork {os.getpid()}, where its "
                "threads, locks and files cannot work. Make it inside the process that uses it, use the start method "
                "`spawn`, or use PackedDataset in workers of a DataLoader."
            )


def end_with_parent() -> None:
    """For a process of a pool, which would wait for work for ever after its parent was killed."""
    parent = multiprocessing.parent_process()

    def wait() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
