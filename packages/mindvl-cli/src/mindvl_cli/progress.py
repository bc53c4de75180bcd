# SPDX-License-Identifier: Apache-2.0
"""Show the progress of long work: a bar on a terminal, otherwise a line every few seconds.

Used by the commands; the packages report progress through a callback.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol

from mindvl_cli.output import escaped

LINE_EVERY_S = 10.0


class Advance(Protocol):
    """Reports `amount` more finished units; `note` (such as the loss) is shown at the end of the line."""

    def __call__(self, amount: float = 1, /, *, note: str | None = None) -> None: ...


@contextmanager
def progress(label: str, *, total: float | None, unit: str = "", done: int = 0) -> Iterator[Advance]:
    """Show rate and time left on stderr while the block runs.

    Args:
        total: Total units; None if unknown, which omits the remaining time.
        unit: Plural name of the unit, such as "samples".
        done: Units finished before a resume; they do not count in the rate and the remaining time.

    Example:
        with progress("write", total=len(samples), unit="samples") as advance:
            for sample in samples:
                write(sample)
                advance()
    """
    show = _bar if sys.stderr.isatty() else _lines
    with show(escaped(label), total, unit, done) as advance:
        yield advance


@contextmanager
def reported_progress(label: str, *, unit: str, scale: float = 1) -> Iterator[Callable[[int, int], None]]:
    """A callback (done, total) for the packages, which opens the bar once the total is known.

    Args:
        scale: Divisor of both numbers for display, such as 1e6 for bytes in MB. A total of 0 is unknown.
    """
    with ExitStack() as stack:
        advance: Advance | None = None
        done_before = 0

        def report(done: int, total: int) -> None:
            nonlocal advance, done_before
            if advance is None:
                advance = stack.enter_context(progress(label, total=total / scale or None, unit=unit))
            advance((done - done_before) / scale)
            done_before = done

        yield report


@contextmanager
def _bar(label: str, total: float | None, unit: str, done_before: int) -> Iterator[Advance]:
    from rich import progress as rich_progress  # imported here, because its import is slow
    from rich.console import Console

    columns = (
        rich_progress.TextColumn("{task.description}", markup=False),
        rich_progress.BarColumn(bar_width=None),
        rich_progress.TextColumn("{task.fields[counts]}", justify="right"),
        rich_progress.TimeRemainingColumn(elapsed_when_finished=True),
        rich_progress.TextColumn("{task.fields[note]}", markup=False),
    )
    started = time.monotonic()
    done: float = done_before
    with rich_progress.Progress(*columns, console=Console(stderr=True), expand=True) as bar:
        task = bar.add_task(label, total=total, completed=done_before, counts=_counts(done, total, unit, None), note="")

        def advance(amount: float = 1, /, *, note: str | None = None) -> None:
            nonlocal done
            done += amount
            per_s = _per_s(done - done_before, time.monotonic() - started)
            bar.update(task, advance=amount, counts=_counts(done, total, unit, per_s))
            if note is not None:
                bar.update(task, note=note)

        yield advance


@contextmanager
def _lines(label: str, total: float | None, unit: str, done_before: int) -> Iterator[Advance]:
    started = last = time.monotonic()
    done, latest_note = float(done_before), ""

    def print_line(now: float) -> None:
        left, per_s = "", _per_s(done - done_before, now - started)
        if total is not None and done < total and per_s:
            left = f", {_clock((total - done) / per_s)} left"
        note = f", {latest_note}" if latest_note else ""
        print(f"{label}: {_counts(done, total, unit, per_s)}{left}{note}", file=sys.stderr, flush=True)

    def advance(amount: float = 1, /, *, note: str | None = None) -> None:
        nonlocal done, last, latest_note
        done += amount
        latest_note = latest_note if note is None else note
        now = time.monotonic()
        if now - last >= LINE_EVERY_S:
            last = now
            print_line(now)

    yield advance
    print_line(time.monotonic())


def _per_s(units: float, elapsed_s: float) -> float | None:
    return units / elapsed_s if units and elapsed_s > 0 else None


def _counts(done: float, total: float | None, unit: str, per_s: float | None) -> str:
    of = "" if total is None else f"/{total:g}"
    rate = f", {_rate(per_s)} {unit}/s" if per_s else ""
    return f"{done:g}{of} {unit}{rate}".replace("  ", " ")


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
