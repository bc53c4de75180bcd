# SPDX-License-Identifier: Apache-2.0
"""Run a Python program in several ranks over gloo, forked from a server process that has imported torch already.

Before layouts.py and the multi-process tests of mindvl-model and mindvl-train. A server has one thread, no process group
and no device other than the CPU. It ends with the process that started it, and so do its ranks. Tests of launchers,
signals and kills start real processes instead.
"""

import gc
import importlib
import os
import pickle
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import IO

from mindvl_model.accelerator import set_up_device
from mindvl_ops.runtime.ports import reserved_port

IMPORTS = ("mindvl_model.megatron.one_step", "mindvl_model.megatron.stages", "mindvl_model.testing.tiny")


def run_ranks(
    arguments: Sequence[str],
    num_ranks: int,
    *,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    imports: Sequence[str] = IMPORTS,
) -> list[str]:
    """Run `python ARGUMENTS` in several ranks with the variables of a launcher; returns the output of each.

    Args:
        arguments: "-c", code and its arguments, or "-m", module and its arguments, or a file and its arguments.
        timeout_s: Seconds until a rank that still runs is killed.
        environment: Variables in addition to those of this process and of a launcher.
        imports: Modules that the server imports once, before it forks.

    Raises:
        AssertionError: A rank failed; the message has the end of its output.
        subprocess.TimeoutExpired: A rank did not end in time.
    """
    # A server cannot fork once a device is in use, and macOS forbids what gloo does after a fork.
    forks = sys.platform == "linux" and set_up_device().kind == "cpu"
    with reserved_port() as port, tempfile.TemporaryDirectory() as directory:
        launcher = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        shared = {**os.environ, "OMP_NUM_THREADS": "1", **launcher, **(environment or {})}
        files = [Path(directory) / str(rank) for rank in range(num_ranks)]
        ranks: list[_ForkedRank | subprocess.Popen[bytes]] = []
        try:
            for rank, file in enumerate(files):
                variables = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                with file.open("wb") as output:
                    if forks:
                        ranks.append(_server(tuple(imports)).fork(arguments, variables, output))
                    else:
                        command = [sys.executable, *arguments]
                        ranks.append(subprocess.Popen(command, env=variables, stdout=output, stderr=output))
            deadline = time.monotonic() + timeout_s  # a server may have been started first
            codes = [process.wait(timeout=max(0.0, deadline - time.monotonic())) for process in ranks]
        except subprocess.TimeoutExpired as error:
            error.output = b"\n".join(file.read_bytes()[-4000:] for file in files)
            raise
        finally:
            for process in ranks:
                process.kill()
        outputs = [file.read_text(errors="replace") for file in files]
    failed = [f"rank {rank}, exit code {code}:\n{outputs[rank][-4000:]}" for rank, code in enumerate(codes) if code]
    assert not failed, "\n".join(failed)
    return outputs


class _ForkedRank:
    """A process that the server has forked."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def wait(self, timeout: float) -> int:
        """The exit code, negative for a signal, as in subprocess."""
        self._connection.settimeout(max(timeout, 1e-3))
        try:
            answer = self._connection.recv(16)
        except TimeoutError:
            raise subprocess.TimeoutExpired("rank", timeout) from None
        assert answer, "the server of ranks has ended"
        return int(answer)

    def kill(self) -> None:
        """Kill the process if it still runs: its supervisor does when the connection closes."""
        self._connection.close()


class _Server:
    """The process that forks, seen from the one that started it."""

    def __init__(self, imports: Sequence[str]) -> None:
        self._directory = tempfile.TemporaryDirectory()
        self._address = f"{self._directory.name}/socket"
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, self._address, *imports],
            env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,  # its end is the end of this process
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n", "the server of ranks did not start"

    def fork(self, arguments: Sequence[str], environment: Mapping[str, str], output: IO[bytes]) -> _ForkedRank:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._address)
        content = pickle.dumps((list(arguments), dict(environment), os.getcwd()))
        socket.send_fds(connection, [len(content).to_bytes(8, "big")], [output.fileno()])
        connection.sendall(content)
        return _ForkedRank(connection)


_server = cache(_Server)


def _serve(address: str, imports: Sequence[str]) -> list[str] | None:
    """Fork a supervisor for each connection until stdin closes; returns in a rank, with its arguments."""
    set_up_device("cpu")
    for name in imports:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # no collection of a rank visits, and so copies, what all ranks share
    assert len(os.listdir("/proc/self/task")) == 1, "an import has started a thread, which a fork would lose"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors are not waited for
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the process that closes stdin
    os.write(1, b"ready\n")
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            os._exit(0)
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return _supervise(connection)
        connection.close()


def _supervise(connection: socket.socket) -> list[str]:
    """Fork the rank, in which this returns; report its exit code, or kill it when the connection closes."""
    head, (output,), _, _ = socket.recv_fds(connection, 8, 1)
    content = b""
    while len(content) < int.from_bytes(head, "big"):
        content += connection.recv(1 << 16)
    arguments, environment, directory = pickle.loads(content)
    rank = os.fork()
    if rank:
        try:
            watch = os.pidfd_open(rank)
            ready, _, _ = select.select([watch, connection.fileno()], [], [])
            if watch not in ready:
                os.kill(rank, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])
            connection.sendall(str(code).encode())
        finally:
            os._exit(0)
    connection.close()
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    result: list[str] = arguments
    return result


def _run(arguments: Sequence[str]) -> None:
    """What `python ARGUMENTS` does."""
    kind, *rest = arguments
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.modules["__main__"] = program = ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(program))
    elif kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        sys.path[0] = str(Path(kind).parent)
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    _run(_serve(sys.argv[1], sys.argv[2:]) or [])
