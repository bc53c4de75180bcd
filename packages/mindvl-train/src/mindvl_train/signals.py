# SPDX-License-Identifier: Apache-2.0
"""Stop signals of schedulers, and exit codes that tell schedulers what to do next.

Used by run.py and launch.py. A signal handler only records the signal: the loop checks for it after each step, saves and
ends. A second signal has no effect, so that it cannot interrupt the save.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

STOPPED = 75  # EX_TEMPFAIL: stopped by a signal after a save; a scheduler may restart the run
DATA_USED_UP = 65  # EX_DATAERR: every source reached its max_epochs before the schedule ended; saved
STUCK = 79  # the watchdog ended the run; restart it, on other machines if it happens twice

# Slurm sends SIGUSR1 some time before the time limit (--signal); Kubernetes and preemption send SIGTERM.
SAVE_AND_END = (signal.SIGTERM, signal.SIGUSR1)


class StopRequests:
    """Records whether a stop signal was received."""

    def __init__(self) -> None:
        self.number: int | None = None  # the first signal received

    def __call__(self) -> bool:
        """Whether a signal was received."""
        return self.number is not None

    def record(self, number: int, frame: object) -> None:
        """Record the signal; a signal handler."""
        self.number = self.number or number


@contextmanager
def stop_requests(*, forward: bool = True) -> Iterator[StopRequests]:
    """Record SIGTERM and SIGUSR1 inside the block; the previous handlers are restored after it.

    A nested block shares the record of the outer one, so that a signal between two training stages stops the next one.
    In threads other than the main thread, where Python handles no signals, no signal is recorded.

    Args:
        forward: Call the previous handler, if it is Python code, at the end of a block that received a signal, because
            the code after the block must end as well. False for a caller that checks the record itself.
    """
    outer = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    if isinstance(outer, StopRequests):
        yield outer
        return
    requests = StopRequests()
    with handled_by(requests.record) as before:
        yield requests
    if forward:
        forward_signal(before, requests)


@contextmanager
def handled_by(handler: "signal._HANDLER") -> Iterator["dict[int, signal._HANDLER]"]:
    """Handle SIGTERM and SIGUSR1 with a handler inside the block; yields the previous handlers.

    Does nothing in threads other than the main thread.
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


def forward_signal(before: "dict[int, signal._HANDLER]", requests: StopRequests) -> None:
    """Call the previous handler, if it is Python code, for a recorded signal."""
    handler = before.get(requests.number or 0)
    if requests.number is not None and callable(handler):
        handler(requests.number, None)


def ignore_from_now_on() -> None:
    """Ignore stop signals in a process that has saved, so that a late signal does not change its exit code."""
    for number in SAVE_AND_END:
        signal.signal(number, signal.SIG_IGN)
