# SPDX-License-Identifier: Apache-2.0
"""A run that no longer moves is ended, and the rank it waits for is named; a slow one is named too."""

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mindvl_train import CheckpointConfig, MetricsConfig, RunConfig
from mindvl_train.config import FaultsConfig
from mindvl_train.faults.watchdog import Watchdog, behind
from mindvl_train.signals import STUCK

pytestmark = pytest.mark.slow

# What `mindvl train --nproc 2` does: a launcher, and processes that log to OUT/logs.
WORKER = """
import logging, os, pickle, sys
from pathlib import Path
from mindvl_train import run_training
from mindvl_train.launch import end_with_launcher

end_with_launcher()
config = pickle.loads(Path(sys.argv[1]).read_bytes())
logs = config.out / "logs"
logs.mkdir(parents=True, exist_ok=True)
logging.basicConfig(filename=logs / f"rank-{os.environ['RANK']}.log", level=logging.INFO)
run_training(config)
"""
LAUNCH = """
import sys
from mindvl_train import ProcessError
from mindvl_train.launch import launch
try:
    launch([sys.executable, "-c", sys.argv[1], sys.argv[2]], 2, threads_per_process=1)
except ProcessError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""
SLEEP = """
import sys, time
from pathlib import Path
from mindvl_train.faults.watchdog import Watchdog
with Watchdog(Path(sys.argv[1]), rank=0, num_ranks=1, limit_s=1.5) as watchdog:
    watchdog.begin("data", 1)
    time.sleep(1.7)  # the first step may take three times as long
    watchdog.begin("checkpoint", 2)
    time.sleep(1.7)  # and so may a save
    watchdog.begin("compute", 2)
    time.sleep(60)
"""


def beat(rank: int, step: int, part: str, modified: float = 100.0) -> dict[str, Any]:
    return {"rank": rank, "host": f"node{rank}", "pid": 7, "step": step, "part": part, "modified": modified}


@pytest.mark.parametrize(
    ("beats", "message"),
    [
        (
            [beat(0, 5, "reduce"), beat(1, 5, "data"), beat(2, 5, "reduce")],
            "Behind: rank 1 (node1, process 7), last seen in part 'data' of step 5.",
        ),
        ([beat(0, 5, "data"), beat(1, 4, "checkpoint")], "Behind: rank 1 (node1, process 7), last seen in part 'check"),
        (
            # Its file says step 6, but it has not been written for a long time.
            [beat(0, 6, "reduce"), beat(1, 6, "update", modified=40.0), beat(2, 6, "reduce", modified=99.0)],
            "Behind: rank 1 (node1, process 7), no heartbeat for 60 s, last seen in part 'update' of step 6.",
        ),
        ([beat(0, 3, "reduce"), beat(1, 3, "reduce")], "All 2 ranks are in part 'reduce' of step 3."),
        ([beat(n, 3, "data" if n else "update") for n in range(12)], "last seen in part 'data' of step 3 and 3 more."),
    ],
)
def test_the_rank_that_others_wait_for_is_found_in_the_heartbeats(beats: list[dict[str, Any]], message: str) -> None:
    assert message in behind(beats, silent_s=30)


def test_without_a_limit_nothing_is_watched_or_written(tmp_path: Path) -> None:
    with Watchdog(tmp_path, rank=0, num_ranks=1, limit_s=0) as watchdog:
        watchdog.begin("data", 1)
    assert list(tmp_path.iterdir()) == []


def test_a_heartbeat_says_what_the_process_does(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat" / "rank-0003.json"
    with Watchdog(tmp_path, rank=3, num_ranks=4, limit_s=2) as watchdog:
        assert json.loads(path.read_text())["part"] == "start"
        watchdog.begin("update", 17)
        deadline = time.monotonic() + 60
        while (heartbeat := json.loads(path.read_text()))["part"] == "start":
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert (heartbeat["rank"], heartbeat["pid"], heartbeat["step"], heartbeat["part"]) == (3, os.getpid(), 17, "update")


def test_a_validation_before_the_first_step_leaves_that_step_its_longer_limit(tmp_path: Path) -> None:
    watchdog = Watchdog(tmp_path, rank=0, num_ranks=1, limit_s=100.0)
    watchdog.begin("validation", 4)
    assert watchdog._first_step is None
    watchdog.begin("data", 5)
    assert watchdog._first_step == 5


def test_a_part_that_takes_too_long_ends_the_process_with_its_stacks(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", SLEEP, str(tmp_path)], capture_output=True, text=True, check=False)
    assert ended.returncode == STUCK
    stacks = (tmp_path / "logs" / "stuck-rank-0000.txt").read_text()
    for text in (stacks, ended.stderr):
        assert "rank 0" in text
        assert "has been in part 'compute' of step 2" in text
        assert "it is in <module> (<string>:11)" in text
        assert "All 1 ranks are in part 'compute' of step 2." in text
    assert "mindvl-watchdog" in stacks or stacks.count("Thread 0x") + stacks.count("Current thread") >= 2
    assert 'File "<string>", line 11 in <module>' in stacks


@pytest.fixture
def two_ranks(make_config: Callable[..., RunConfig], tmp_path: Path) -> Iterator[tuple[Path, "subprocess.Popen[str]"]]:
    """Two processes that train for long, watched closely; the directory of the run and the launcher."""
    config = make_config(
        steps=100_000,
        checkpoints=CheckpointConfig(every_steps=100_000),
        metrics=MetricsConfig(every_steps=1, tensorboard=False),
        faults=FaultsConfig(stuck_after_s=20),
    )
    job = tmp_path / "job.pickle"
    job.write_bytes(pickle.dumps(config))
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCH, WORKER, str(job)], stderr=subprocess.PIPE, text=True)
    try:
        yield config.out, launcher
    finally:
        launcher.kill()  # its processes notice
        launcher.wait()


def pid_of(out: Path, rank: int) -> int:
    pid: int = json.loads((out / "heartbeat" / f"rank-{rank:04d}.json").read_text())["pid"]
    return pid


def cpu_ticks(pid: int) -> int:
    """Processor time of a process, usually in units of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


@pytest.mark.multi
def test_a_rank_that_is_slow_and_then_stands_still_is_named_both_times(
    two_ranks: tuple[Path, "subprocess.Popen[str]"],
) -> None:
    out, launcher = two_ranks
    deadline = time.monotonic() + 500
    metrics, log = out / "metrics.jsonl", out / "logs" / "rank-0.log"
    while not metrics.is_file() or metrics.read_text().count("\n") < 3:
        assert launcher.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    slow = pid_of(out, 1)
    while "is slow" not in log.read_text():
        assert time.monotonic() < deadline
        os.kill(slow, signal.SIGSTOP)
        time.sleep(0.3)
        before, resumed = cpu_ticks(slow), time.monotonic()
        os.kill(slow, signal.SIGCONT)
        # Measured by its own work, so that it is never stuck on a busy machine.
        while cpu_ticks(slow) < before + 2 and time.monotonic() < resumed + 1:
            time.sleep(0.005)
    assert f"process {slow}) is slow: " in log.read_text()

    os.kill(slow, signal.SIGSTOP)
    _, printed = launcher.communicate(timeout=300)
    assert launcher.returncode == STUCK
    assert f"rank 0: process ended with exit code {STUCK}" in printed
    stacks = (out / "logs" / "stuck-rank-0000.txt").read_text()
    assert "Behind: rank 1 (" in stacks
    assert f"process {slow}), no heartbeat for " in stacks
    assert "distributed_c10d.py" in stacks or "param_and_grad_buffer.py" in stacks
