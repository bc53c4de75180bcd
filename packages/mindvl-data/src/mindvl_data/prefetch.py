# SPDX-License-Identifier: Apache-2.0
"""Work done ahead of the training step: threads that run jobs in order, and a plan computed by one of them.

Stands between data_order and loader. The threads are daemons that a finalizer stops, so neither `close` nor the end of
the interpreter waits for a read that hangs; and no exception is lost: it reaches whoever asks for the result.
"""

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from mindvl_data.order.data_order import DataOrder, OrderedStep
from mindvl_data.process import OwnProcess

T = TypeVar("T")
_Jobs = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]

_PATIENCE_S = 5.0  # how long closing waits for a thread that is in the middle of a job


class Workers:
    """A few threads that run jobs in the order in which they were given.

    Args:
        on_start: Called first in each thread, such as to bind it to cores.
    """

    def __init__(self, count: int, name: str, on_start: Callable[[], None] | None = None) -> None:
        self._jobs: _Jobs = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=_work, args=(self._jobs, on_start), name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()
        self._process = OwnProcess("threads of a loader")
        # Runs once: at close, when the last reference goes, or at the end of the interpreter.
        self._stop = weakref.finalize(self, _stop, self._process, self._jobs, self._threads, _PATIENCE_S)

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Run `job` as soon as a thread is free.

        Raises:
            RuntimeError: They were closed; nobody would ever run it.
            DataError: This is a fork of their process; nobody would ever run it either.
        """
        self._process.check()
        if not self._stop.alive:
            raise RuntimeError("the threads of this loader were closed. Make a new loader.")
        future: Future[T] = Future()
        self._jobs.put((future, job))
        return future

    def close(self) -> None:
        """Cancel what has not begun and end the threads; a job that hangs is left behind after a few seconds."""
        self._stop()

    def finish(self) -> None:
        """The same, but wait for the jobs that run, however long they take."""
        if self._stop.detach() is not None:
            _stop(self._process, self._jobs, self._threads, None)


class OrderPrefetcher:
    """The steps of a data_order, one after another, computed ahead.

    Args:
        num_steps: Steps planned ahead in a thread of their own; 0: each step when it is asked for, without a thread.
        on_start: Called first in that thread.
    """

    def __init__(self, data_order: DataOrder, *, num_steps: int, on_start: Callable[[], None] | None = None) -> None:
        self._steps = _Steps(data_order)
        self._on_start = on_start
        self._num_steps = num_steps
        self._workers: Workers | None = None  # from the first step on, so that a state can be loaded before
        self._ordered: deque[Future[OrderedStep | None]] = deque()

    @property
    def is_ready(self) -> bool:
        """Whether the next step can be had without waiting for it."""
        return bool(self._ordered) and self._ordered[0].done()

    def next_step(self) -> OrderedStep | None:
        """The next step; None at the end of the plan.

        Raises:
            Exception: Whatever the data_order raised, with its traceback; then again at every call.
        """
        if not self._num_steps:
            return self._steps.next_step()
        self._order()
        step = self._ordered[0].result()  # taken out only once it is there: an interrupt must not skip a step
        self._ordered.popleft()
        self._order()
        return step

    def close(self) -> None:
        """Stop planning; waits a few seconds at most."""
        if self._workers is not None:
            self._workers.close()

    def finish(self) -> None:
        """Stop planning and wait for the step being planned, because it uses what the next data_order will use."""
        if self._workers is not None:
            self._workers.finish()

    def _order(self) -> None:
        if self._workers is None:
            self._workers = Workers(1, "mindvl-order", self._on_start)
        while len(self._ordered) < self._num_steps:
            self._ordered.append(self._workers.submit(self._steps.next_step))


class _Steps:
    """The data_order with its end and its failure remembered, as steps are ordered before it is known to have either."""

    def __init__(self, data_order: DataOrder) -> None:
        self._data_order = data_order
        self._has_ended = False
        self._error: BaseException | None = None

    def next_step(self) -> OrderedStep | None:
        if self._error is not None:
            raise self._error
        if self._has_ended:
            return None
        try:
            step = self._data_order.next_step()
        except BaseException as error:
            self._error = error  # the data_order stopped half-way through a step: what follows would be another plan
            raise
        self._has_ended = step is None
        return step


def _work(jobs: _Jobs, on_start: Callable[[], None] | None) -> None:
    if on_start is not None:
        on_start()
    while (entry := jobs.get()) is not None:
        future, job = entry
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(job())
            except BaseException as error:  # handed to whoever asks for the result
                future.set_exception(error)
        del entry, future, job  # a thread that waits must not keep a pack, or its loader, in memory


def _stop(process: OwnProcess, jobs: _Jobs, threads: list[threading.Thread], patience_s: float | None) -> None:
    if not process.is_current:
        return  # at the end of a fork: it has none of the threads, and their locks may never be released
    while True:
        try:
            entry = jobs.get_nowait()
        except queue.Empty:
            break
        if entry is not None:
            entry[0].cancel()
    for _ in threads:
        jobs.put(None)
    for thread in threads:
        if thread is not threading.current_thread():  # the last reference may go in a thread of ours
            thread.join(patience_s)
