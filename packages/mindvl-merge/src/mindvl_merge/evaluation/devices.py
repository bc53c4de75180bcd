# SPDX-License-Identifier: Apache-2.0
"""Answer batches on several devices: one process for each, which loads the model once and prepares one batch in advance.

Used by predict.py, which makes the batches; they are the same for any number of devices, so that the answers are too.
"""

import multiprocessing
import pickle
import queue
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol, cast

from mindvl_merge.errors import EvaluationError

Answered = tuple[int, list[str], float]  # number of the batch, its answers, seconds of generation

_IN_FLIGHT = 2  # batches of a process: one is generated while the next is prepared


class Answers(Protocol):
    """What a process does with a batch; loading happens before the first call."""

    def prepare(self, batch: Any) -> Any:
        """Inputs of a batch on the host."""

    def generate(self, inputs: Any) -> tuple[list[str], float]:
        """Answers, and the seconds that they took."""


def check_device(name: str) -> None:
    """Refuse a device that does not exist on this machine.

    Raises:
        EvaluationError: The name is unknown, or the machine has no such device.
    """
    import torch

    if name in ("auto", "cpu"):
        return
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    count = 0 if accelerator is None else torch.accelerator.device_count()
    kind, _, index = name.partition(":")
    is_known = accelerator is not None and kind == accelerator.type and (not index or index.isdecimal())
    if not is_known or (index and int(index) >= count):
        kinds = [
            "auto",
            "cpu",
            *([accelerator.type] if accelerator else []),
            *(f"{accelerator}:{i}" for i in range(count)),
        ]
        raise EvaluationError(f"--device: {name!r} is not a device of this machine. Choose from {', '.join(kinds)}.")


class DevicePool:
    """Processes that answer batches; they start with the first batch and end with the pool.

    Args:
        make: Called in each process with its device and the number of processes; must be importable there.
        devices: Name of the device of each process.
    """

    def __init__(self, make: Callable[[str, int], "Answers"], devices: Sequence[str]) -> None:
        self._make = make
        self._devices = list(devices)
        self._processes: list[Any] = []
        self._connections: list[Connection] = []

    def answer(self, batches: Sequence[Any]) -> Iterator[Answered]:
        """Answers of all batches, in the order in which they are complete.

        Raises:
            EvaluationError: A process ended. An error in a process is raised here.
        """
        if not self._processes:
            self._start()
        waiting = list(enumerate(batches))[::-1]
        num_open = len(batches)
        try:
            for connection in self._connections * _IN_FLIGHT:
                if waiting:
                    connection.send(waiting.pop())
            while num_open:
                for connection in cast("list[Connection]", wait(self._connections)):
                    number, answers, seconds = self._receive(connection)
                    num_open -= 1
                    if waiting:
                        connection.send(waiting.pop())
                    yield number, answers, seconds
        finally:
            if num_open:  # later answers would be taken for those of the next call
                self.close()

    def close(self) -> None:
        """End the processes at once."""
        for process in self._processes:
            process.terminate()
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")  # CUDA and NPU do not survive a fork
        for device in self._devices:
            here, there = context.Pipe()
            arguments = (there, self._make, device, len(self._devices))
            process = context.Process(target=_serve, args=arguments, daemon=True, name=f"mindvl answers on {device}")
            process.start()
            there.close()  # the only other end is in the process, so that its end is noticed
            self._processes.append(process)
            self._connections.append(here)

    def _receive(self, connection: Connection) -> Answered:
        try:
            result = connection.recv()
        except (EOFError, ConnectionError) as error:
            place = self._connections.index(connection)
            self._processes[place].join(10)
            raise EvaluationError(
                f"--device: the process of {self._devices[place]} ended with exit code {self._processes[place].exitcode}. "
                "Free memory or lower --batch-size, and run the command again: answers so far are kept with --out."
            ) from error
        if isinstance(result, BaseException):
            raise result
        answered: Answered = result
        return answered


def _serve(connection: Connection, make: Callable[[str, int], Answers], device: str, num_processes: int) -> None:
    """Main function of a process: answer batches until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the first one ends the others
    try:
        answers = make(device, num_processes)
    except Exception as error:
        _send_error(connection, error)
        return
    prepared: queue.Queue[tuple[int, Any] | None] = queue.Queue()
    threading.Thread(target=_prepare_all, args=(connection, answers, prepared), daemon=True).start()
    while (entry := prepared.get()) is not None:
        number, inputs = entry
        try:
            if isinstance(inputs, Exception):
                raise inputs
            connection.send((number, *answers.generate(inputs)))
        except BrokenPipeError:
            return
        except Exception as error:
            _send_error(connection, error)


def _prepare_all(connection: Connection, answers: Answers, prepared: Any) -> None:
    while True:
        try:
            number, batch = connection.recv()
        except (EOFError, OSError):
            prepared.put(None)
            return
        try:
            prepared.put((number, answers.prepare(batch)))
        except Exception as error:
            prepared.put((number, error))


def _send_error(connection: Connection, error: Exception) -> None:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # an error of a library that cannot be sent
        error = RuntimeError("".join(traceback.format_exception(error)))
    connection.send(error)
