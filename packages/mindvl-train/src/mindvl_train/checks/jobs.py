# SPDX-License-Identifier: Apache-2.0
"""Run a task of a check in separate processes and collect the results.

Used by parallel.py and packing.py, which are also the main modules of the processes.
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
    """The same run without data logs and validation, which stops at the first anomalous step."""
    return replace(
        config,
        data=replace(config.data, audit_log=None, quarantine_log=None),
        faults=replace(config.faults, on_anomalous_step="stop"),
        validation=None,
    )


def run_job(program: str, task: Any, directory: Path, *, processes: int, num_cores: int) -> list[Any]:
    """Run a task on every rank and return the results by rank.

    Args:
        program: Module that calls `run_rank`.
        directory: Directory to create for the files of the job.
        num_cores: Number of cores for all processes.

    Raises:
        TrainError: A rank failed; the message is that of the first one.
    """
    directory.mkdir(parents=True)
    job = directory / "job"
    job.write_bytes(pickle.dumps(task))
    try:
        launch([sys.executable, "-m", program, str(job)], processes, threads_per_process=max(1, num_cores // processes))
    except TrainError as error:
        # The first in time: later errors may be consequences of it.
        problems = sorted(directory.glob("problem-*"), key=lambda path: path.stat().st_mtime_ns)
        raise TrainError(problems[0].read_text() if problems else str(error)) from None
    return [pickle.loads((directory / f"result-{rank:04d}").read_bytes()) for rank in range(processes)]


def run_rank(work: Callable[[Any], Any]) -> None:
    """Main function of a process of a job, whose path is on the command line: run work on the task, store the result."""
    end_with_launcher()
    job = Path(sys.argv[1])
    rank = int(os.environ["RANK"])
    try:
        result = work(pickle.loads(job.read_bytes()))
    except Exception as error:
        # The message for the report; the traceback goes to stderr.
        (job.parent / f"problem-{rank:04d}").write_text(f"{type(error).__name__}: {error}")
        raise
    (job.parent / f"result-{rank:04d}").write_bytes(pickle.dumps(result))
