# SPDX-License-Identifier: Apache-2.0
"""A directory is claimed by one run at a time, and free again once that process has ended in any way."""

import os
import signal
from pathlib import Path

import pytest

from mindvl_train import TrainError, claim


def test_a_killed_process_leaves_no_claim_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "_TIMEOUT_S", 0.0)
    read_end, write_end = os.pipe()
    pid = os.fork()
    if not pid:
        with claim.claimed(tmp_path / "run"):
            os.write(write_end, b"claimed")
            signal.pause()
    os.read(read_end, 7)
    with pytest.raises(TrainError, match=rf"is locked by another run \(process {pid} on .*another directory"):
        claim.claimed(tmp_path / "run").__enter__()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with claim.claimed(tmp_path / "run"):
        assert str(os.getpid()) in (tmp_path / "run" / claim.FILE).read_text()


def test_an_out_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    with pytest.raises(TrainError, match=r"run\.lock: is not writable .*Set `out` to a writable directory"):
        claim.claimed(tmp_path / "run").__enter__()
    assert (tmp_path / "run").read_text() == "mine"
