# SPDX-License-Identifier: Apache-2.0
"""The link to the best checkpoint, and what a kill leaves of it."""

import os
from pathlib import Path

import pytest

from mindvl_train.checkpoints.best import link_best
from mindvl_train.checkpoints.directory import complete_checkpoints, newest_checkpoint, restore_replaced
from mindvl_train.errors import CheckpointError


def make(directory: Path, *names: str) -> None:
    for name in names:
        (directory / name).mkdir(parents=True)


def test_the_link_follows_and_goes_with_its_checkpoint(tmp_path: Path) -> None:
    make(tmp_path, "step-00000002", "step-00000004")
    link_best(tmp_path, "step-00000002")
    assert os.readlink(tmp_path / "best") == "step-00000002"  # relative
    assert newest_checkpoint(tmp_path / "best").name == "step-00000002"
    (tmp_path / "best.unfinished").symlink_to("step-00000009")  # of a killed process
    link_best(tmp_path, "step-00000004")
    assert newest_checkpoint(tmp_path / "best").name == "step-00000004"
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-00000002", "step-00000004"]
    link_best(tmp_path, "step-00000009")  # there is no such checkpoint
    assert not (tmp_path / "best").is_symlink()
    with pytest.raises(CheckpointError, match="there is no best checkpoint yet"):
        newest_checkpoint(tmp_path / "best")


def test_a_checkpoint_that_lost_its_name_in_a_kill_gets_it_back(tmp_path: Path) -> None:
    make(tmp_path, "step-00000002.replaced.unfinished", "step-00000004.replaced.unfinished", "step-00000004")
    restore_replaced(tmp_path)
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-00000002", "step-00000004"]
    assert (tmp_path / "step-00000004.replaced.unfinished").exists()  # the newer one is complete
