# SPDX-License-Identifier: Apache-2.0
"""What schedulers send before they take a machine away, and the exit codes by which they know what to do next.

Comes around run.py and launch.py. A signal is only remembered: the loop asks after each step, saves and ends, and a
second one changes nothing, so that it cannot break off the save.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

STOPPED = 75  # EX_TEMPFAIL: asked to stop, saved; a scheduler may start the run again
DATA_USED_UP = 65  # EX_DATAERR: every source has reached its max_epochs before the schedule ended; saved
STUCK = 79  # the watchdog ended the run; start it again, on other machines if it happens twice

# SIGUSR1 is what Slurm is told to send some time before the end (--signal); Kubernetes and preemption send SIGTERM.
SAVE_AND_END = (signal.SIGTERM, signal.SIGUSR1)


class StopRequests:
    """Whether somebody asked to save and end."""

    def __init__(self) -> None:
        self._asked = threading.Event()

    def __call__(self) -> bool:
        """Whether a signal has come."""
        return self._asked.is_set()

    def note(self, number: int, frame: object) -> None:
        """Remember it; a signal handler."""
        self._asked.set()


@contextmanager
def stop_requests() -> Iterator[StopRequests]:
    """Remember SIGTERM and SIGUSR1 inside the block; what handled them before handles them again after it.

    A block inside another one shares its memory, so that what comes between two runs of a plan stops the next one. In
    other threads than the main one, where Python takes no signals, nothing is ever asked.
    """
    outer = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    if isinstance(outer, StopRequests):
        yield outer
        return
    requests = StopRequests()
    with handled_by(requests.note):
        yield requests


@contextmanager
def handled_by(handler: "signal._HANDLER") -> Iterator[None]:
    """Hand SIGTERM and SIGUSR1 to a handler inside the block; does nothing in other threads than the main one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in SAVE_AND_END}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def ignore_from_now_on() -> None:
    """For a process that has saved and only has to exit: a late signal must not change its exit code."""
    for number in SAVE_AND_END:
        signal.signal(number, signal.SIG_IGN)
