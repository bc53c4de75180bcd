# SPDX-License-Identifier: Apache-2.0
"""Worker processes that are replaced when they die, hang or need too much memory.

Used by both engines: the local engine runs one pool of several workers, Ray one pool of one worker in each actor. A batch
in which a worker ends is repeated record by record by the next worker; the record that ends that worker as well goes to
quarantine, and the part continues after it.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path

from mindvl_data.curation.config import LimitsConfig
from mindvl_data.curation.engine.tasks import IDLE, LOADING, READING, Heartbeat, Task
from mindvl_data.errors import DataError

_POLL_S = 0.1
_MAX_ENDS = 2  # of workers while they read, load or write, before the part is given up
_GIB = 1 << 30

OnRead = Callable[[int, int], None]  # (number of the part, records read since the last call)


class WorkerPool:
    """Runs tasks in worker processes.

    Args:
        num_workers: Number of processes.
        limits: Limits of a worker.
        log: File for what the workers write to stderr.
    """

    def __init__(self, num_workers: int, limits: LimitsConfig, log: Path) -> None:
        self._num_workers = num_workers
        self._limits = limits
        self._log = log
        self._workers: list[_Worker] = []

    def run(self, tasks: Iterable[Task], on_read: OnRead = lambda part, count: None) -> Iterator[int]:
        """Run tasks; yields the number of each part when it is complete, in any order.

        Raises:
            DataError: A step cannot work, for example because an endpoint does not answer, or a model cannot be loaded.
        """
        waiting = iter(tasks)
        busy: list[_Worker] = []
        next_task = next(waiting, None)
        while next_task is not None or busy:
            while next_task is not None and len(busy) < self._num_workers:
                worker = self._idle_worker(busy)
                worker.start(next_task)
                busy.append(worker)
                next_task = next(waiting, None)
            wait([worker.connection for worker in busy], timeout=_POLL_S)
            for worker in list(busy):
                if worker.advance(on_read):
                    busy.remove(worker)
                    assert worker.task is not None
                    yield worker.task.part.number

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _idle_worker(self, busy: "list[_Worker]") -> "_Worker":
        for worker in self._workers:
            if worker not in busy:
                return worker
        worker = _Worker(self._limits, self._log)
        self._workers.append(worker)
        return worker


class _Worker:
    """One worker process and the task it runs; the process is replaced when it ends."""

    def __init__(self, limits: LimitsConfig, log: Path) -> None:
        self._limits = limits
        self._log = log
        self.task: Task | None = None
        self._ends: dict[int, int] = {}  # phase -> workers that ended in it outside of any record
        self._launch()

    def start(self, task: Task) -> None:
        """Give the worker a task."""
        self.task, self._ends, self._num_read = task, {}, 0
        if self._process.poll() is not None:  # ended while it was idle, for example with the thread that started it
            self._heartbeat.close()
            self.connection.close()
            self._launch()
        self._send()

    def advance(self, on_read: OnRead) -> bool:
        """Handle messages and limits; returns whether the task is complete."""
        assert self.task is not None
        try:
            while self.connection.poll():
                kind, content = self.connection.recv()
                if kind == "done":
                    return True
                if kind == "refused":
                    raise DataError(content)
                if kind == "failed":
                    raise RuntimeError(
                        f"part {self.task.part.number}: the worker failed unexpectedly: {content}. Report this error."
                    )
                self._num_read += content
                on_read(self.task.part.number, content)
        except (EOFError, ConnectionResetError):
            self._process.wait()
            reason: str | None = self._ended_by()
        else:
            if reason := self._over_limit():
                self.kill()
        if reason:
            self._replace(reason)
            on_read(self.task.part.number, -self._num_read)  # the part begins again
            self._num_read = 0
        return False

    def kill(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self.connection.close()

    def _launch(self) -> None:
        self._heartbeat = Heartbeat()
        self.connection, other = Pipe()
        descriptors = (other.fileno(), self._heartbeat.descriptor)
        memory_bytes = int(self._limits.memory_gib * _GIB)
        arguments = [*map(str, descriptors), str(memory_bytes), str(os.getpid())]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mindvl_data.curation.engine.worker", *arguments],
                pass_fds=descriptors, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,  # Ctrl-C in a terminal stops the main process, which ends the workers
            )  # fmt: skip
        other.close()

    def _send(self) -> None:
        try:
            self.connection.send(self.task)
        except BrokenPipeError:
            self._process.wait()
            raise DataError(
                f"{self._log}: a worker process ended when it started ({self._ended_by()}). See this file for the cause."
            ) from None

    def _over_limit(self) -> str | None:
        phase, _, _, count, _, started = self._heartbeat.read()
        limits = self._limits
        is_work = count > 0 and phase != LOADING
        allowed = limits.seconds_per_record if is_work else limits.loading_s
        if started and phase != IDLE and time.monotonic() - started > allowed:
            setting = "seconds_per_record" if is_work else "loading_s"
            return f"took more than {allowed:g} s (limits.{setting})"
        if _resident_bytes(self._process.pid) > limits.memory_gib * _GIB:
            return f"needed more than {limits.memory_gib:g} GiB of memory (limits.memory_gib)"
        return None

    def _ended_by(self) -> str:
        code = self._process.returncode
        if code < 0:
            return f"ended the worker process by {signal.Signals(-code).name}"
        return f"ended the worker process with exit code {code}"

    def _replace(self, reason: str) -> None:
        """Start a new process, and have it avoid what ended this one."""
        task = self.task
        assert task is not None
        phase, number, piece, count, last, started = self._heartbeat.read()
        self._heartbeat.close()
        self.connection.close()
        if not started:
            raise DataError(
                f"{self._log}: a worker process ended when it started ({reason}). See this file for the cause."
            )
        if count == 0 or phase == LOADING:
            self._ends[phase] = self._ends.get(phase, 0) + 1
            if self._ends[phase] >= _MAX_ENDS:
                if phase != READING:
                    step = "loading a model or table" if phase == LOADING else "writing the part"
                    raise DataError(
                        f"{self._log}: {step} {reason}. Raise limits.memory_gib or limits.loading_s, or see this file."
                    )
                task = replace(task, failed={**task.failed, (number, 0, READING): f"reading {reason}"})
        elif count == 1:
            task = replace(task, failed={**task.failed, (number, piece, phase): reason})
        else:
            task = replace(task, careful=(*task.careful, (number, last)))
        self.task = task
        self._launch()
        self._send()


def _resident_bytes(pid: int) -> int:
    """Memory of a process; 0 where the system does not show it."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_bytes().split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
