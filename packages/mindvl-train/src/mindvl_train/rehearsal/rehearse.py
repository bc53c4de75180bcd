# SPDX-License-Identifier: Apache-2.0
"""Rehearse one rank of a recipe in a process of its own, because fake groups and patches belong to a process.

Comes after job.py; process.py is what the new process runs. The stub of the device runtime is compiled here.
"""

import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

from mindvl_ops.errors import OpsError
from mindvl_ops.testing.cuda_runtime import cuda_stub_environment
from mindvl_ops.testing.npu_runtime import stub_environment
from mindvl_train.config import RunConfig
from mindvl_train.devices import find_device
from mindvl_train.errors import TrainError
from mindvl_train.launch import LAUNCHER, ended
from mindvl_train.layout_search.packs import Pack
from mindvl_train.rehearsal.job import Job, job_of, kind_of
from mindvl_train.rehearsal.record import RankRecord, progress_path

_MAX_LINES = 16  # of the error of a rank
_DEFAULT_GPU = "a100"  # for the device name cuda
_ERROR = re.compile(r"\w+(Error|Exception): ")


@contextmanager
def prepared_environment(device: str) -> Iterator[dict[str, str]]:
    """Environment of the processes of ranks; the stub of the device runtime is compiled once, and removed at the end.

    Raises:
        TrainError: torch_npu, a CUDA build of torch or a C compiler is missing.
    """
    with tempfile.TemporaryDirectory(prefix="mindvl-rehearsal-") as directory:
        try:
            environment = _environment(device, Path(directory))
        except OpsError as error:
            raise TrainError(f"--device {device}: {error}") from error
        yield environment


def _environment(device: str, directory: Path) -> dict[str, str]:
    kind = kind_of(device)
    if kind == "cpu":
        return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    if kind == "npu":
        return stub_environment(directory)
    found = find_device(device) or find_device(_DEFAULT_GPU)
    assert found is not None
    assert found.capability is not None
    return cuda_stub_environment(
        directory, name=found.name, memory_bytes=int(found.memory_gb * 1e9), capability=found.capability
    )


def rehearse(
    config: RunConfig,
    *,
    recipe: str,
    device: str,
    world_size: int,
    rank: int,
    steps: int = 2,
    pack: Pack | None = None,
    environment: dict[str, str] | None = None,
) -> RankRecord:
    """Run one rank of a job of any size without its device and without the other ranks.

    Args:
        recipe: Path or name, for the record.
        device: Name in the device table, or "cpu".
        steps: Steps to run; the record describes the last one. 1: optimizer states exist before it, as after a resume.
        pack: Pack of every microbatch; None: the largest that the recipe allows.
        environment: Result of prepared_environment; None: made for this call.

    Raises:
        TrainError: The layout does not fit, a part of prepared_environment is missing, or the step fails.
    """
    job = job_of(config, recipe=recipe, device=device, world_size=world_size, rank=rank, steps=steps, pack=pack)
    if environment is not None:
        return rehearse_job(job, environment)
    with prepared_environment(job.device) as made:
        return rehearse_job(job, made)


def rehearse_job(job: Job, environment: dict[str, str]) -> RankRecord:
    """Run the process of one rank and read its record.

    Raises:
        TrainError: The step fails; the message ends with the last lines of the process.
    """
    with RankProcess(job, environment) as process:
        process.wait()
        return process.record()


class RankProcess:
    """The process of one rank, which is killed at the end of the block if it still runs.

    Args:
        job: The rank.
        environment: Result of prepared_environment.
        log: File for the messages of the process; None: a temporary one.
    """

    def __init__(self, job: Job, environment: dict[str, str], log: Path | None = None) -> None:
        self.job = job
        self._environment = environment
        self._log = log

    def __enter__(self) -> Self:
        self._stack = ExitStack()
        directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="mindvl-rehearsal-")))
        self._record_path = directory / "record.json"
        self._log_path = self._log or directory / "log"
        (directory / "job").write_bytes(pickle.dumps(self.job))
        command = [
            sys.executable,
            "-m",
            "mindvl_train.rehearsal.process",
            str(directory / "job"),
            str(self._record_path),
        ]
        environment = self._environment | {LAUNCHER: str(os.getpid())}  # it ends with this process
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("wb") as log:
            # In a session of its own, so that Ctrl-C does not reach it, but this process, which kills it.
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        return self

    def __exit__(self, *_: object) -> None:
        if not self.has_ended():
            self._process.kill()
            self._process.wait()
            self._log_path.unlink(missing_ok=True)  # nothing failed here
        self._stack.close()

    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def wait(self) -> None:
        """Wait until the process has ended."""
        self._process.wait()

    @property
    def progress(self) -> float:
        """Share of the forward passes that have begun."""
        try:
            return float(progress_path(self._record_path).read_text())
        except (OSError, ValueError):  # not yet written, or just being written
            return 0.0

    def record(self) -> RankRecord:
        """The record of a process that has ended.

        Raises:
            TrainError: It failed.
        """
        job, code = self.job, self._process.returncode
        if code:
            lines = [line for line in self._log_path.read_text(errors="replace").splitlines() if line.strip()]
            errors = [line for line in lines if _ERROR.search(line)] or lines[-1:]
            shown = "".join(errors[-1:]) if self._log is not None else "\n".join(lines[-_MAX_LINES:])
            log = "its last lines" if self._log is None else str(self._log)
            where = f"{job.recipe}: rank {job.rank} of {job.world_size} on {job.device}"
            if code < 0:
                raise TrainError(
                    f"{where}: the rehearsal {ended(code)}. Free memory, rehearse fewer ranks with --ranks, or find the sender "
                    "of the signal in the system log."
                )
            raise TrainError(
                f"{where}: the rehearsal failed with exit code {code}: {shown} Correct the recipe or the operator that {log} "
                "names."
            )
        return RankRecord.read(self._record_path)
