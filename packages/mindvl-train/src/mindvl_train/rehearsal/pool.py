# SPDX-License-Identifier: Apache-2.0
"""Rehearse several ranks of a job side by side, one process each.

Comes after classes.py has chosen the ranks; rehearse.py runs one of them.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from mindvl_train.rehearsal.job import Job
from mindvl_train.rehearsal.record import RankRecord
from mindvl_train.rehearsal.rehearse import RankProcess, prepared_environment

MEMORY_OF_PROCESS = 2e9  # bytes of host memory; recipes of this project need at most 1.1 GB
_POLL_S = 0.2


def num_parallel(num_cores: int, memory_bytes: float) -> int:
    """Number of processes that a machine runs side by side."""
    return max(1, min(num_cores, int(memory_bytes // MEMORY_OF_PROCESS)))


def rehearse_ranks(
    jobs: Sequence[Job],
    *,
    at_once: int,
    log_path: Callable[[int], Path],
    on_progress: Callable[[Mapping[int, float]], None] = lambda shares: None,
) -> list[RankRecord]:
    """Rehearse all jobs; returns their records in the same order.

    Args:
        jobs: Ranks of one run on one device.
        at_once: Number of processes.
        log_path: File for the messages of a rank, which is removed when the rank succeeds.
        on_progress: Called now and then with the finished share of every rank that has started.

    Raises:
        TrainError: A rank failed; the others are stopped.
    """
    found: dict[int, RankRecord] = {}
    shares: dict[int, float] = {}
    waiting = list(jobs)
    with prepared_environment(jobs[0].device) as made, ExitStack() as stack:
        environment = made | {"OMP_NUM_THREADS": "1"}  # one core for each process
        running: list[tuple[RankProcess, ExitStack]] = []
        while waiting or running:
            while waiting and len(running) < at_once:
                job = waiting.pop(0)
                own = stack.enter_context(ExitStack())
                running.append((own.enter_context(RankProcess(job, environment, log_path(job.rank))), own))
            time.sleep(_POLL_S)
            for process, own in [each for each in running if each[0].has_ended()]:
                found[process.job.rank] = process.record()
                shares[process.job.rank] = 1.0
                log_path(process.job.rank).unlink()
                own.close()
                running.remove((process, own))
            shares.update({process.job.rank: process.progress for process, _ in running})
            on_progress(shares)
    return [found[job.rank] for job in jobs]
