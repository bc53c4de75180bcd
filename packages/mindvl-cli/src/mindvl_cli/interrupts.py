# SPDX-License-Identifier: Apache-2.0
"""Handle SIGTERM and SIGUSR1: they end a command at once, as Ctrl-C does; training saves a checkpoint first.

Wraps every command (main.py), before anything heavy is imported. A signal raises `Stopped` in the main thread, so that
`with` blocks and `finally` clean up. During training mindvl_train.signals records the signal instead, saves, and then
calls the handler of this file, so that the command ends too.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

STOPPED = 75  # EX_TEMPFAIL, as mindvl_train.signals has it: the same command, started again, continues
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

# Commands that resume when they are started again.
_CONTINUES = frozenset(
    {("demo",), ("train",), ("eval",), ("search-resolution",), ("data", "write"), ("data", "index"), ("data", "curate")}
)
_AGAIN_S = 10.0  # interval at which the exception is raised again, in case a destructor swallowed it


class Stopped(BaseException):
    """A signal stopped the command; not an Exception, so that no error handler catches it.

    Args:
        number: Signal number.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
        self.command: tuple[str, ...] = ()  # names after `mindvl`, set by the groups that the exception passes

    @property
    def continues(self) -> bool:
        """Whether the same command, started again, continues."""
        return self.command[:1] in _CONTINUES or self.command[:2] in _CONTINUES

    @property
    def exit_code(self) -> int:
        """75 if the same command continues, otherwise what a shell reports for the signal."""
        return STOPPED if self.continues else 128 + self.number

    def __str__(self) -> str:
        name = signal.Signals(self.number).name
        return f"mindvl: stopped by {name}. Start the same command again{' to continue' if self.continues else ''}."


class StoppableGroup(click.Group):
    """A command group that records the name of its command in `Stopped`."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except Stopped as stopped:
            stopped.command = (ctx.invoked_subcommand or "", *stopped.command)
            raise


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Inside the block SIGTERM and SIGUSR1 raise Stopped in the main thread."""
    before = {number: signal.signal(number, _stop) for number in (*SIGNALS, signal.SIGALRM)}
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            if signal.getsignal(number) is _stop:  # a process that has saved its checkpoint ignores them
                signal.signal(number, handler)


_asked = signal.SIGTERM  # the first signal that came; SIGALRM repeats it


def _stop(number: int, frame: object) -> None:
    global _asked
    if number != signal.SIGALRM:
        _asked = signal.Signals(number)
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S, _AGAIN_S)
    raise Stopped(_asked)
