# SPDX-License-Identifier: Apache-2.0
"""Start the processes of a run on this machine, by torch's own elastic launcher, and end with them.

Comes before run.py in every process; on a cluster torchrun or the scheduler does this.
"""

import os
import threading
import time
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from mindvl_train.errors import TrainError

PARENT = "MINDVL_LAUNCHER"


def launch(command: Sequence[str], num_processes: int) -> None:
    """Run a command in several processes with the rank variables of torchrun; returns when all have ended well.

    Raises:
        TrainError: A process failed; the others were stopped.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        run_id="mindvl",
    )
    threads = str(max(1, (os.cpu_count() or 1) // num_processes))
    before = dict(os.environ)  # the launcher leaves variables of its own behind
    # More threads than cores make every process wait for the others'.
    os.environ.setdefault("OMP_NUM_THREADS", threads)
    os.environ[PARENT] = str(os.getpid())
    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise TrainError(
            f"process {rank} of {num_processes} ended with exit code {failure.exitcode}. "
            "Its own message stands above. Mend that and start again; the run goes on from its last checkpoint."
        ) from error
    finally:
        os.environ.clear()
        os.environ.update(before)


def end_with_launcher() -> None:
    """In a launched process: leave at once when the launcher is gone, so that no rank trains on alone.

    A killed launcher cannot say goodbye; the operating system gives its children another parent, which shows here.
    """
    launcher = os.environ.get(PARENT)
    if launcher is None:
        return

    def watch() -> None:
        while os.getppid() == int(launcher):
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, name="mindvl-launcher-watch", daemon=True).start()
