# SPDX-License-Identifier: Apache-2.0
"""The engine `ray`: parts as rows of a Ray dataset, each run by a supervised worker beside an actor.

An alternative to WorkerPool with the same methods. Ray distributes the parts and starts actors; the files of a part are
written by the same code as with the local engine, so that they are the same bytes. On several machines the inputs and the
output must be on a shared file system; this is checked when the engine starts.
"""

import os
import pickle
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mindvl_data.curation.engine.supervision import OnRead, WorkerPool
from mindvl_data.curation.engine.tasks import Task
from mindvl_data.curation.extras import require
from mindvl_data.errors import DataError


class RayEngine:
    """Runs tasks on a Ray cluster: the one of RAY_ADDRESS, or else a new one on this machine.

    Args:
        num_workers: Number of actors, each with one worker process.
        log: File for what the workers write to stderr.
        paths: Files and directories that every machine must have.
    """

    def __init__(self, num_workers: int, log: Path, paths: Sequence[Path] = ()) -> None:
        self._ray = require("ray", extra="ray", where="--engine ray")
        self._data = require("ray.data", extra="ray", where="--engine ray")
        self._num_workers = num_workers
        self._log = log
        self._starts_cluster = not self._ray.is_initialized()
        if self._starts_cluster:
            self._start()
        self._check_shared(paths)

    def run(self, tasks: Iterable[Task], on_read: OnRead = lambda part, count: None) -> Iterator[int]:
        """Run tasks; yields the number of each part when it is complete, in any order.

        Raises:
            DataError: As WorkerPool.run.
        """
        rows = [{"task": pickle.dumps((task, str(self._log)))} for task in tasks]
        if not rows:
            return
        dataset = self._data.from_items(rows, override_num_blocks=len(rows)).map(
            _Actor,
            concurrency=min(self._num_workers, len(rows)),
            num_cpus=1,
        )
        for row in dataset.iter_rows():
            if row["error"]:
                raise DataError(row["error"])
            on_read(row["part"], row["records"])
            yield row["part"]

    def close(self) -> None:
        """Stop the cluster if this engine started it."""
        if self._starts_cluster:
            self._ray.shutdown()

    def __enter__(self) -> "RayEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        import logging

        address = os.environ.get("RAY_ADDRESS")
        environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}}
        more: dict[str, Any] = {} if address else {"num_cpus": self._num_workers, "include_dashboard": False}
        try:
            self._ray.init(
                address=address, runtime_env=environment, log_to_driver=False, logging_level=logging.ERROR, **more
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise DataError(
                f"--engine ray: Ray cannot be started: {error}. Check RAY_ADDRESS and the cluster."
            ) from error
        context = self._data.DataContext.get_current()
        context.enable_progress_bars = False
        context.print_on_execution_start = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)

    def _check_shared(self, paths: Sequence[Path]) -> None:
        """Check on every machine of the cluster that the paths exist."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        if len(nodes) < 2:
            return
        find = self._ray.remote(num_cpus=0)(_missing)
        names = [str(path) for path in paths]
        for node in nodes:
            strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            missing = self._ray.get(find.options(scheduling_strategy=strategy).remote(names), timeout=120)
            if missing:
                raise DataError(
                    f"{missing[0]}: does not exist on the machine {node['NodeManagerAddress']} of the Ray cluster. Use a "
                    "directory that all machines share for the inputs and --out."
                )


def _missing(paths: list[str]) -> list[str]:
    return [path for path in paths if not os.path.exists(path)]


class _Actor:
    """Runs one task at a time in a supervised worker process."""

    def __init__(self) -> None:
        self._pool: WorkerPool | None = None

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        task, log = pickle.loads(row["task"])
        self._pool = self._pool or WorkerPool(1, task.limits, Path(log))
        records = 0

        def count(part: int, read: int) -> None:
            nonlocal records
            records += read

        error = ""
        try:
            for _ in self._pool.run([task], count):
                pass
        except DataError as bad:
            error = str(bad)
        return {"part": task.part.number, "records": records, "error": error}
