# SPDX-License-Identifier: Apache-2.0
"""The process of one rank: `python -m mindvl_train.rehearsal.process JOB RECORD`.

Started by rehearse.py with the environment of the device; the process is changed for good and ends after the run.
"""

import logging
import os
import pickle
import sys
import tempfile
import warnings
from pathlib import Path

import torch

from mindvl_model import set_up_device
from mindvl_train.launch import end_with_launcher
from mindvl_train.rehearsal.job import Job
from mindvl_train.rehearsal.record import progress_path


def main(job_path: Path, record_path: Path) -> None:
    """Rehearse the rank of a pickled job, and write its record."""
    end_with_launcher()
    job: Job = pickle.loads(job_path.read_bytes())
    os.environ |= {"RANK": str(job.rank), "WORLD_SIZE": str(job.world_size), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    logging.getLogger().setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    device = set_up_device(job.kind).device()
    if job.kind == "npu":
        from mindvl_ops.testing.npu_runtime import prepare_fake_npu

        prepare_fake_npu()
    elif job.kind == "cuda":
        torch.cuda.init()  # before it, the number of devices comes from a library of the driver
    # Imported here: these modules import megatron-core, which needs the device setup first.
    from mindvl_train.rehearsal.rank import Rank
    from mindvl_train.rehearsal.stage import config_of, replaced
    from mindvl_train.run import run_training

    rank = Rank(job, device, progress_path(record_path))
    with (
        tempfile.TemporaryDirectory() as out,
        replaced(job, rank),
        torch.autograd.set_multithreading_enabled(False),  # backward passes run in this thread, whose stack is recorded
        rank.device_mode,
    ):
        run_training(config_of(job, Path(out)), resume="never")
    record_path.write_text(rank.record().as_json())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
