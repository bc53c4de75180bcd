# SPDX-License-Identifier: Apache-2.0
"""Hand a task to processes of its own and learn how they fared: what the checks of layouts run in.

Comes before parallel.py and packing.py, which are also the programs of the processes.
"""

import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from mindvl_train.config import RunConfig
from mindvl_train.errors import TrainError
from mindvl_train.launch import end_with_launcher, launch


def apart(config: RunConfig) -> RunConfig:
    """The same run, that writes no log where the recipe's own runs do, and ends with its first bad step."""
    return replace(
        config,
        data=replace(config.data, audit_log=None, quarantine_log=None),
        faults=replace(config.faults, on_anomalous_step="stop"),
    )


def run_job(program: str, task: Any, directory: Path, *, processes: int, num_cores: int) -> list[Any]:
    """Run a task on every rank and return what the ranks found, in their order.

    Args:
        program: Module whose `be_one_rank` call takes the task.
        directory: Made for the job; is left with its files.
        num_cores: Shared by the processes.

    Raises:
        TrainError: A rank failed, with the words of the first one.
    """
    directory.mkdir(parents=True)
    job = directory / "job"
    job.write_bytes(pickle.dumps(task))
    try:
        launch([sys.executable, "-m", program, str(job)], processes, threads_per_process=max(1, num_cores // processes))
    except TrainError as error:
        # The first in time: those that come after may have lost a peer only.
        said = sorted(directory.glob("problem-*"), key=lambda path: path.stat().st_mtime_ns)
        raise TrainError(said[0].read_text() if said else str(error)) from None
    return [pickle.loads((directory / f"result-{rank:04d}").read_bytes()) for rank in range(processes)]


def be_one_rank(work: Callable[[Any], Any]) -> None:
    """In a process of a job, named on the command line: do the work on its task and leave the result."""
    end_with_launcher()
    job = Path(sys.argv[1])
    rank = int(os.environ["RANK"])
    try:
        result = work(pickle.loads(job.read_bytes()))
    except Exception as error:
        # The words for the table; the traceback goes to stderr.
        (job.parent / f"problem-{rank:04d}").write_text(f"{type(error).__name__}: {error}")
        raise
    (job.parent / f"result-{rank:04d}").write_bytes(pickle.dumps(result))
