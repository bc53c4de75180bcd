# SPDX-License-Identifier: Apache-2.0
"""Start the processes of a run on this machine and wait for them.

On a cluster torchrun or the scheduler does this. torch's own launcher is not used because it keeps its signal handlers
in the calling process, and kills ranks that need more than 30 seconds to save.
"""

import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Any

from mindvl_ops.runtime.ports import reserved_port
from mindvl_train.errors import ProcessError, TrainError
from mindvl_train.signals import STUCK, StopRequests, forward_signal, handled_by

logger = logging.getLogger(__name__)

LAUNCHER = "MINDVL_LAUNCHER"  # process id of the launcher, in the environment of its children
_POLL_S = 0.1


def launch(command: Sequence[str], num_processes: int, *, threads_per_process: int, max_restarts: int = 0) -> None:
    """Run a command in several processes with the rank variables of torchrun; returns when all have succeeded.

    SIGTERM and SIGUSR1 are forwarded to the processes, which save and end, and then to the previous handlers; a keyboard
    interrupt ends the processes immediately.

    Args:
        max_restarts: Number of restarts of all processes after one of them failed; none after a stop signal.

    Raises:
        ProcessError: A process failed; the others were killed.
    """
    requests = StopRequests()
    received: list[int] = []  # sent by _wait, because a signal may come before all processes are started

    def keep(number: int, frame: object) -> None:
        requests.record(number, frame)
        received.append(number)

    before: dict[int, Any] = {}
    try:
        with handled_by(keep) as before:
            for left in range(max_restarts, -1, -1):
                try:
                    _run_once(command, num_processes, threads_per_process, received)
                    return
                except ProcessError as error:
                    if not left or requests():
                        raise
                    logger.warning("%s Restarting all processes; %d restarts left.", error, left - 1)
    finally:  # also after a success: code after this call must handle the signal as well
        forward_signal(before, requests)


def _run_once(command: Sequence[str], num_processes: int, threads_per_process: int, received: list[int]) -> None:
    processes: list[subprocess.Popen[bytes]] = []
    with reserved_port() as port:
        shared = {
            "WORLD_SIZE": str(num_processes),
            "LOCAL_WORLD_SIZE": str(num_processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            # More threads than cores slow down every process.
            "OMP_NUM_THREADS": str(threads_per_process),
            LAUNCHER: str(os.getpid()),
        }
        try:
            for rank in range(num_processes):
                ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(subprocess.Popen(command, env={**os.environ, **shared, **ranks}))
            _wait(processes, received)
        finally:
            for process in processes:
                process.kill()  # a no-op for processes that have ended
            for process in processes:
                process.wait()


def local_rank_and_size() -> tuple[int, int]:
    """(local rank, number of processes) on this machine, from the variables of the launcher."""
    return int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def world_size() -> int:
    """Number of processes of the run on all machines, from the variables of the launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def restart_count() -> int:
    """Number of restarts of this run by torchrun; 0 under other launchers.

    Raises:
        TrainError: torchrun shares one store over restarts on several machines, whose counts may differ.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return 0  # each start has its own store
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1 and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0:
        raise TrainError(
            "torchrun --max-restarts: on several machines, restarted processes would read the addresses of killed "
            "processes from the shared store. Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and use --rdzv-backend=c10d, or "
            "remove --max-restarts."
        )
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def end_with_launcher() -> None:
    """In a launched process: exit immediately when the launcher has ended, so that no rank continues alone.

    A killed launcher cannot notify its children, but the operating system assigns them another parent process.
    """
    launcher = os.environ.get(LAUNCHER)
    if launcher is None:
        return

    def watch() -> None:
        while os.getppid() == int(launcher):
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, name="mindvl-launcher-watch", daemon=True).start()


def _wait(processes: Sequence["subprocess.Popen[bytes]"], received: list[int]) -> None:
    while True:
        while received:
            number = received.pop(0)
            for process in processes:
                process.send_signal(number)
        codes = [process.poll() for process in processes]
        failed = {rank: code for rank, code in enumerate(codes) if code}
        if failed:
            # Other ranks fail as a consequence: report the rank that was stuck or killed first.
            rank = min(failed, key=lambda rank: (failed[rank] != STUCK, failed[rank] > 0))
            raise ProcessError(
                f"rank {rank}: process {ended(failed[rank])} ({len(processes)} processes). "
                f"{'Fix the error in its message above' if failed[rank] > 0 else 'Find the sender in the system log'} "
                "and start again; the run resumes from its last checkpoint.",
                failed[rank],
            )
        if all(code == 0 for code in codes):
            return
        time.sleep(_POLL_S)


def ended(exit_code: int) -> str:
    """How a process ended, such as "ended with exit code 1"."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    name = signal.Signals(-exit_code).name if -exit_code in set(signal.Signals) else f"signal {-exit_code}"
    cause = ", perhaps because the machine had no memory left" if -exit_code == signal.SIGKILL else ""
    return f"was ended by {name}{cause}"
