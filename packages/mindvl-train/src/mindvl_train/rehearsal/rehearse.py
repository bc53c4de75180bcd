# SPDX-License-Identifier: Apache-2.0
"""Rehearse one rank of a recipe in a process of its own, because fake groups and patches belong to a process.

Comes after job.py; process.py is what the new process runs. The stub of the NPU runtime is compiled here.
"""

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mindvl_ops.errors import OpsError
from mindvl_ops.testing.npu_runtime import stub_environment
from mindvl_train.config import RunConfig
from mindvl_train.errors import TrainError
from mindvl_train.layout_search.packs import Pack
from mindvl_train.rehearsal.job import Job, Kind, job_of
from mindvl_train.rehearsal.record import RankRecord

_MAX_LINES = 16  # of the error of a rank


@contextmanager
def prepared_environment(kind: Kind) -> Iterator[dict[str, str]]:
    """Environment of the processes of ranks; for NPUs the stub runtime is compiled once, and removed at the end.

    Raises:
        TrainError: torch_npu or a C compiler is missing.
    """
    with tempfile.TemporaryDirectory(prefix="mindvl-rehearsal-") as directory:
        if kind != "npu":
            yield {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
            return
        try:
            yield stub_environment(Path(directory))
        except OpsError as error:
            raise TrainError(f"--device: {error}") from error


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
        TrainError: The layout does not fit, torch_npu or a C compiler is missing, or the step fails.
    """
    job = job_of(config, recipe=recipe, device=device, world_size=world_size, rank=rank, steps=steps, pack=pack)
    if environment is not None:
        return rehearse_job(job, environment)
    with prepared_environment(job.kind) as made:
        return rehearse_job(job, made)


def rehearse_job(job: Job, environment: dict[str, str]) -> RankRecord:
    """Run the process of one rank and read its record.

    Raises:
        TrainError: The step fails; the message ends with the last lines of the process.
    """
    with tempfile.TemporaryDirectory(prefix="mindvl-rehearsal-") as directory:
        job_path, record_path = Path(directory) / "job", Path(directory) / "record.json"
        job_path.write_bytes(pickle.dumps(job))
        command = [sys.executable, "-m", "mindvl_train.rehearsal.process", str(job_path), str(record_path)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise TrainError(_message(job, done.returncode, done.stderr.splitlines()))
        return RankRecord.read(record_path)


def _message(job: Job, code: int, lines: Sequence[str]) -> str:
    shown = "\n".join(lines[-_MAX_LINES:])
    return (
        f"{job.recipe}: rank {job.rank} of {job.world_size} on {job.device}: the rehearsal failed with exit code {code}. "
        f"Correct the recipe or the operator that its last lines name:\n{shown}"
    )
