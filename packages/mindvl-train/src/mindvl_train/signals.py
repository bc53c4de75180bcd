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
        self.number: int | None = None  # the first signal that came

    def __call__(self) -> bool:
        """Whether a signal has come."""
        return self.number is not None

    def note(self, number: int, frame: object) -> None:
        """Remember it; a signal handler."""
        self.number = self.number or number


@contextmanager
def stop_requests(*, hand_on: bool = True) -> Iterator[StopRequests]:
    """Remember SIGTERM and SIGUSR1 inside the block; what handled them before handles them again after it.

    A block inside another one shares its memory, so that what comes between two runs of a plan stops the next one. In
    other threads than the main one, where Python takes no signals, nothing is ever asked.

    Args:
        hand_on: Call the earlier handler, where Python code is one, at the end of a block in which a signal came: what
            follows the block must end as well. False for a caller that asks the result of the block.
    """
    outer = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    if isinstance(outer, StopRequests):
        yield outer
        return
    requests = StopRequests()
    with handled_by(requests.note) as before:
        yield requests
    if hand_on:
        tell(before, requests)


@contextmanager
def handled_by(handler: "signal._HANDLER") -> Iterator["dict[int, signal._HANDLER]"]:
    """Hand SIGTERM and SIGUSR1 to a handler inside the block, which gets the handlers that were there before.

    Does nothing in other threads than the main one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield {}
        return
    before = {int(number): signal.signal(number, handler) for number in SAVE_AND_END}
    try:
        yield before
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def tell(before: "dict[int, signal._HANDLER]", requests: StopRequests) -> None:
    """Call the handler that was there before, where it is Python code, for a signal that came meanwhile."""
    handler = before.get(requests.number or 0)
    if requests.number is not None and callable(handler):
        handler(requests.number, None)


def ignore_from_now_on() -> None:
    """For a process that has saved and only has to exit: a late signal must not change its exit code."""
    for number in SAVE_AND_END:
        signal.signal(number, signal.SIG_IGN)
