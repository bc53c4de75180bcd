# SPDX-License-Identifier: Apache-2.0
"""Work ahead of the training step: threads that run jobs in order, and one that computes the data order.

Comes between the data order and the loader. The threads are daemons stopped by a finalizer, so neither `close` nor the
end of the interpreter waits for a read that hangs. Exceptions are raised where the result is requested.
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

_JOIN_TIMEOUT_S = 5.0  # wait of `close` for a thread that is running a job


class Workers:
    """Threads that run jobs in the order of submission.

    Args:
        on_start: Called at the start of each thread, for example to bind it to cores.
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
        # Runs once: at close, when the last reference is deleted, or at the end of the interpreter.
        self._stop = weakref.finalize(self, _stop, self._process, self._jobs, self._threads, _JOIN_TIMEOUT_S)

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Run `job` as soon as a thread is free.

        Raises:
            RuntimeError: The threads were stopped by `close`.
            DataError: This process is a fork, which has none of the threads.
        """
        self._process.check()
        if not self._stop.alive:
            raise RuntimeError("Loader: its threads were stopped. Create a new loader.")
        future: Future[T] = Future()
        self._jobs.put((future, job))
        return future

    def close(self) -> None:
        """Cancel jobs that have not started and stop the threads; a job that hangs is abandoned after a few seconds."""
        self._stop()

    def finish(self) -> None:
        """Like `close`, but wait for running jobs without a time limit."""
        if self._stop.detach() is not None:
            _stop(self._process, self._jobs, self._threads, None)


class OrderPrefetcher:
    """The steps of a data order, computed ahead by a thread.

    Args:
        num_steps: Steps computed ahead; 0: each step is computed when it is requested, without a thread.
        on_start: Called at the start of the thread.
    """

    def __init__(self, data_order: DataOrder, *, num_steps: int, on_start: Callable[[], None] | None = None) -> None:
        self._steps = _Steps(data_order)
        self._on_start = on_start
        self._num_steps = num_steps
        self._workers: Workers | None = None  # started with the first step, so that a state can be loaded before
        self._futures: deque[Future[OrderedStep | None]] = deque()

    @property
    def is_ready(self) -> bool:
        """Whether the next step is available without waiting."""
        return bool(self._futures) and self._futures[0].done()

    def next_step(self) -> OrderedStep | None:
        """The next step; None at the end of the data order.

        Raises:
            Exception: Any exception of the data order, with its traceback; raised again by every later call.
        """
        if not self._num_steps:
            return self._steps.next_step()
        self._submit()
        step = self._futures[0].result()  # removed only when it is available: an interrupt must not skip a step
        self._futures.popleft()
        self._submit()
        return step

    def close(self) -> None:
        """Stop computing steps; waits a few seconds at most."""
        if self._workers is not None:
            self._workers.close()

    def finish(self) -> None:
        """Stop computing steps and wait for the current one, which uses the same files as the next data order."""
        if self._workers is not None:
            self._workers.finish()

    def _submit(self) -> None:
        if self._workers is None:
            self._workers = Workers(1, "mindvl-order", self._on_start)
        while len(self._futures) < self._num_steps:
            self._futures.append(self._workers.submit(self._steps.next_step))


class _Steps:
    """A data order that stores its end and its exception, because steps are requested before either is known."""

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
            self._error = error  # the data order stopped within a step: later steps would have another order
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
            except BaseException as error:  # raised where the result is requested
                future.set_exception(error)
        del entry, future, job  # a waiting thread must not keep a pack or its loader in memory


def _stop(process: OwnProcess, jobs: _Jobs, threads: list[threading.Thread], timeout_s: float | None) -> None:
    if not process.is_current:
        return  # a fork has none of the threads, and their locks may never be released
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
        if thread is not threading.current_thread():  # the last reference may be deleted in one of these threads
            thread.join(timeout_s)
