# SPDX-License-Identifier: Apache-2.0
"""Tests of starting several processes on one machine."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mindvl_train import ProcessError, TrainError
from mindvl_train.launch import launch, restart_count

pytestmark = pytest.mark.slow

WRITE_PLACE = """
import os, pathlib, sys
values = " ".join(os.environ[name] for name in ("WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS"))
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(values)
"""

TRAIN_FOREVER = """
import os, pathlib, signal, sys, time
from mindvl_train.launch import end_with_launcher
end_with_launcher()
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: sys.exit(0))
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(600)
"""

LAUNCH = """
import signal, sys
from mindvl_train.launch import launch, restart_count
if __name__ == "__main__":
    # A shell without job control starts background work with interrupts ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        launch([sys.executable, "-c", sys.argv[2], sys.argv[1]], 2, threads_per_process=1)
    except KeyboardInterrupt:
        sys.exit(130)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
"""


@pytest.mark.multi
def test_every_process_gets_its_place_and_nothing_changes_here(tmp_path: Path) -> None:
    before = dict(os.environ), [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]

    launch([sys.executable, "-c", WRITE_PLACE, str(tmp_path)], 2, threads_per_process=3)

    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0": "2 0 3", "1": "2 1 3"}
    assert (dict(os.environ), [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]) == before


@pytest.mark.multi
def test_a_process_that_fails_is_named_with_its_exit_code_and_the_others_end() -> None:
    fails = "import os, sys, time; sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(600)"
    started = time.monotonic()

    with pytest.raises(TrainError, match=r"rank 1: process ended with exit code 7 \(2 processes\)"):
        launch([sys.executable, "-c", fails], 2, threads_per_process=1)

    assert time.monotonic() - started < 300


@pytest.mark.multi
def test_a_process_that_a_signal_ended_is_named_with_the_signal() -> None:
    fails = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    with pytest.raises(ProcessError, match=r"rank 0: process was ended by SIGKILL, perhaps because .* \(1 processes\)"):
        launch([sys.executable, "-c", fails], 1, threads_per_process=1)


@pytest.mark.multi
@pytest.mark.parametrize(
    ("number", "exit_code"),
    [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGUSR1, 0)],
)
def test_no_process_outlives_its_launcher(tmp_path: Path, number: signal.Signals, exit_code: int) -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, str(tmp_path), TRAIN_FOREVER], stderr=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + 500  # three interpreters import torch; a busy machine takes its time
    while len([path for path in tmp_path.iterdir() if path.read_text()]) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    children = [int(path.read_text()) for path in tmp_path.iterdir()]

    os.kill(launcher.pid, number)  # to the launcher alone: it must forward the signal to its children

    assert launcher.wait(timeout=300) == exit_code
    while any(_runs(child) for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends between opening and reading
        return False


@pytest.mark.multi
@pytest.mark.parametrize("max_restarts", [1, 2])
def test_failed_processes_are_started_again_as_often_as_asked(tmp_path: Path, max_restarts: int) -> None:
    # Rank 0 fails in its first two starts; its peer would wait for ever and is ended each time.
    fails_twice = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "if os.environ['RANK'] == '0':\n"
        "    before = len(list(Path(sys.argv[1]).iterdir()))\n"
        "    Path(sys.argv[1], str(before)).touch()\n"
        "    sys.exit(79 if before < 2 else 0)\n"
        "while not Path(sys.argv[1], '2').exists():\n"
        "    time.sleep(0.05)"
    )
    command = [sys.executable, "-c", fails_twice, str(tmp_path)]

    if max_restarts == 2:
        launch(command, 2, threads_per_process=1, max_restarts=2)
    else:
        with pytest.raises(ProcessError, match="rank 0: process ended with exit code 79") as caught:
            launch(command, 2, threads_per_process=1, max_restarts=1)
        assert caught.value.exit_code == 79
    assert len(list(tmp_path.iterdir())) == 1 + max_restarts


def test_starts_by_torchrun_are_distinguished_if_its_counts_are_reliable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert restart_count() == 0
    for name, value in (("USE_AGENT_STORE", "True"), ("RESTART_COUNT", "2"), ("MAX_RESTARTS", "3")):
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    assert restart_count() == 2
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    with pytest.raises(TrainError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        restart_count()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert restart_count() == 0


@pytest.mark.multi
@pytest.mark.parametrize("ends_well", [True, False])
def test_the_caller_of_the_launcher_receives_the_signal(tmp_path: Path, ends_well: bool) -> None:
    """A check of several layouts must not start the next one."""
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    ask = "import os, signal, sys, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(600)"
    if ends_well:
        ask = f"import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); {ask}"
    try:
        if ends_well:
            launch([sys.executable, "-c", ask], 1, threads_per_process=1)
        else:
            with pytest.raises(ProcessError):
                launch([sys.executable, "-c", ask], 1, threads_per_process=1)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM]


@pytest.mark.multi
def test_a_signal_that_comes_before_the_processes_reaches_them(monkeypatch: pytest.MonkeyPatch) -> None:
    start, received = subprocess.Popen, []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))

    def late(*arguments: Any, **options: Any) -> "subprocess.Popen[bytes]":
        os.kill(os.getpid(), signal.SIGTERM)
        return start(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", late)
    try:
        with pytest.raises(ProcessError, match="was ended by SIGTERM"):
            launch([sys.executable, "-c", "import time; time.sleep(600)"], 1, threads_per_process=1)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM]
