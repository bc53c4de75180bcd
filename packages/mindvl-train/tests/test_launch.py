# SPDX-License-Identifier: Apache-2.0
"""Tests of starting several processes on one machine."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mindvl_train import TrainError
from mindvl_train.launch import launch

WRITE_RANK = (
    "import os, pathlib, sys; pathlib.Path(sys.argv[1], os.environ['RANK']).write_text(os.environ['WORLD_SIZE'])"
)

TRAIN_FOREVER = """
import os, pathlib, sys, time
from mindvl_train.launch import end_with_launcher
end_with_launcher()
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(120)
"""

LAUNCH = """
import sys
from mindvl_train.launch import launch
if __name__ == "__main__":
    launch([sys.executable, "-c", sys.argv[2], sys.argv[1]], 2)
"""


@pytest.mark.multi
def test_every_process_gets_its_rank_and_the_environment_is_as_before(tmp_path: Path) -> None:
    before = dict(os.environ)

    launch([sys.executable, "-c", WRITE_RANK, str(tmp_path)], 2)

    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0": "2", "1": "2"}
    assert dict(os.environ) == before


@pytest.mark.multi
def test_a_process_that_fails_is_named_with_its_exit_code() -> None:
    with pytest.raises(TrainError, match=r"process 1 of 2 ended with exit code 7"):
        launch([sys.executable, "-c", "import os, sys; sys.exit(7 * int(os.environ['RANK']))"], 2)


@pytest.mark.multi
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_process_outlives_its_launcher(tmp_path: Path, number: signal.Signals) -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, str(tmp_path), TRAIN_FOREVER], stderr=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + 60
    while len(list(tmp_path.iterdir())) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(0.2)
    children = [int(path.read_text()) for path in tmp_path.iterdir()]

    os.kill(launcher.pid, number)  # to the launcher alone: its children must notice by themselves
    launcher.wait(timeout=60)

    while any(_runs(child) for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
