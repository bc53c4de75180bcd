# SPDX-License-Identifier: Apache-2.0
"""Start the processes of a run on this machine, and end with them.

Comes before run.py in every process; on a cluster torchrun or the scheduler does this. torch's own launcher is not used
here: it keeps the signal handlers of the calling process, and gives ranks 30 seconds to save before it kills them.
"""

import logging
import os
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Any

from mindvl_train.errors import ProcessError, TrainError
from mindvl_train.signals import STUCK, StopRequests, handled_by, tell

logger = logging.getLogger(__name__)

_LAUNCHER = "MINDVL_LAUNCHER"  # process id of the launcher, in the environment of its children
_POLL_S = 0.1


def launch(command: Sequence[str], num_processes: int, *, threads_per_process: int, max_restarts: int = 0) -> None:
    """Run a command in several processes with the rank variables of torchrun; returns when all have ended well.

    SIGTERM and SIGUSR1 are handed to the processes, which save and end, and afterwards to what handled them before; an
    interrupt ends the processes at once.

    Args:
        max_restarts: How often all processes are started again after one of them failed; not after such a signal.

    Raises:
        ProcessError: A process failed; the others were ended.
    """
    processes: list[subprocess.Popen[bytes]] = []
    requests = StopRequests()

    def hand_on(number: int, frame: object) -> None:
        requests.note(number, frame)
        for process in processes:
            process.send_signal(number)

    before: dict[int, Any] = {}
    try:
        with handled_by(hand_on) as before:
            for left in range(max_restarts, -1, -1):
                try:
                    _run_once(command, num_processes, threads_per_process, processes)
                    return
                except ProcessError as error:
                    if not left or requests():
                        raise
                    logger.warning("%s Starting again, %d more times if need be.", error, left - 1)
    finally:  # whether the processes ended well or by the signal: what follows must end as well
        tell(before, requests)


def _run_once(
    command: Sequence[str], num_processes: int, threads_per_process: int, processes: list["subprocess.Popen[bytes]"]
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # More threads than cores make every process wait for the others'.
        "OMP_NUM_THREADS": str(threads_per_process),
        _LAUNCHER: str(os.getpid()),
    }
    try:
        for rank in range(num_processes):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(subprocess.Popen(command, env={**os.environ, **shared, **place}))
        _wait(processes)
    finally:
        for process in processes:
            process.kill()  # a no-op for those that have ended
        for process in processes:
            process.wait()
        processes.clear()


def local_rank_and_size() -> tuple[int, int]:
    """(rank, number of processes) on this machine, as the launcher, torchrun or a scheduler said."""
    return int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def world_size() -> int:
    """Number of processes of the run, on all machines."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def restart_count() -> int:
    """How often torchrun has started the processes of this run before; 0 under other launchers.

    Raises:
        TrainError: It may restart them on several machines, whose numbers then differ, with one store for all starts.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return 0  # each start has a store of its own
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1 and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0:
        raise TrainError(
            "torchrun on several machines with --max-restarts: restarted processes would meet the addresses of killed "
            "ones in its store. Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun and use --rdzv-backend=c10d, or "
            "leave --max-restarts out."
        )
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def end_with_launcher() -> None:
    """In a launched process: leave at once when the launcher is gone, so that no rank trains on alone.

    A killed launcher cannot say goodbye; the operating system gives its children another parent, which shows here.
    """
    launcher = os.environ.get(_LAUNCHER)
    if launcher is None:
        return

    def watch() -> None:
        while os.getppid() == int(launcher):
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, name="mindvl-launcher-watch", daemon=True).start()


def _wait(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    while True:
        codes = [process.poll() for process in processes]
        failed = {rank: code for rank, code in enumerate(codes) if code}
        if failed:
            # Ranks that lose a peer fail too: the one that was stuck or killed is what happened.
            rank = min(failed, key=lambda rank: (failed[rank] != STUCK, failed[rank] > 0))
            raise ProcessError(
                f"process {rank} of {len(processes)} ended with exit code {failed[rank]}. Its own message "
                "stands above. Mend that and start again; the run goes on from its last checkpoint.",
                failed[rank],
            )
        if all(code == 0 for code in codes):
            return
        time.sleep(_POLL_S)
