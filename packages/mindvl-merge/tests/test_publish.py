# SPDX-License-Identifier: Apache-2.0
"""The old directory stays until the new one is whole, also when the process ends or the disk is full in between."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mindvl_merge import MergeConfig, MergeError, merge, publish
from mindvl_merge.publish import partial_directory, recover, replace_directory


@pytest.fixture
def both(tmp_path):
    """The old directory `out` and a finished one to put in its place."""
    for name in ("out", ".out.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "is").write_text(name)
    return tmp_path / ".out.partial", tmp_path / "out"


def _names(path):
    return sorted(one.name for one in path.iterdir())


@pytest.mark.parametrize("can_exchange", [True, False])
def test_the_new_directory_takes_the_name(both, monkeypatch, can_exchange):
    partial, out = both
    if not can_exchange:
        monkeypatch.setattr(publish, "_exchange", lambda one, two: False)
    replace_directory(partial, out)
    assert (out / "is").read_text() == ".out.partial"
    assert _names(out.parent) == ["out"]


@pytest.mark.skipif(sys.platform != "linux", reason="renameat2 is Linux's")
def test_the_name_is_never_free_where_names_can_be_exchanged(both, monkeypatch):
    partial, out = both
    if not publish._exchange(partial, out):
        pytest.skip("this file system cannot exchange names")
    publish._exchange(partial, out)
    seen = []
    rename = Path.rename
    monkeypatch.setattr(Path, "rename", lambda self, target: (seen.append(out.exists()), rename(self, target))[1])
    replace_directory(partial, out)
    assert seen == [True]  # only what the name had before is moved, after the exchange


@pytest.mark.parametrize("renames", [1, 2])
def test_an_end_between_two_renames_is_undone_by_the_next_start(both, monkeypatch, renames):
    partial, out = both
    monkeypatch.setattr(publish, "_exchange", lambda one, two: False)
    rename = Path.rename
    done = []

    def killed(self, target):
        if len(done) == renames:
            raise KeyboardInterrupt
        done.append(target)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", killed)
    monkeypatch.setattr(publish, "_sync", lambda path: None if len(done) < 2 else killed(path, path))
    with pytest.raises(KeyboardInterrupt):
        replace_directory(partial, out)
    monkeypatch.undo()
    assert out.exists() == (renames == 2)
    recover(out)
    assert (out / "is").read_text() == ("out" if renames == 1 else ".out.partial")
    assert ".out.old" not in _names(out.parent)


def test_a_merge_killed_between_two_renames_keeps_the_former_result(tmp_path, make_directory, random_tensors):
    model = make_directory("a", random_tensors(0))
    merge(MergeConfig(models=(model,), out=tmp_path / "out"))
    (tmp_path / "out").rename(tmp_path / ".out.old")
    with pytest.raises(MergeError, match="out: the output exists"):
        merge(MergeConfig(models=(model,), out=tmp_path / "out"))
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_two_processes_do_not_write_one_output(tmp_path, make_directory, random_tensors):
    model = make_directory("a", random_tensors(0))
    with partial_directory(tmp_path / "out"), pytest.raises(MergeError, match="another merge is writing it"):
        merge(MergeConfig(models=(model,), out=tmp_path / "out"))
    (tmp_path / ".out.partial" / "left").mkdir(parents=True)  # by a process that was killed
    merge(MergeConfig(models=(model,), out=tmp_path / "out"))
    assert not (tmp_path / "out" / "left").exists()
    assert _names(tmp_path) == ["a", "out"]


FULL_DISK = """
import resource, sys
from pathlib import Path
from mindvl_merge import MergeConfig, MergeError, merge
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    merge(MergeConfig(models=(Path(sys.argv[1]),), out=Path(sys.argv[2]), overwrite=True))
except MergeError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_file_that_cannot_be_written_gives_one_sentence_and_keeps_the_former_result(tmp_path, make_directory):
    """A limit on the size of files fails in the same calls as a full disk, without needing one."""
    import torch

    model = make_directory("a", {"w": torch.ones(100, 1000)})
    merge(MergeConfig(models=(model,), out=tmp_path / "out"))
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    command = [sys.executable, "-c", FULL_DISK, str(model), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.startswith(f"{tmp_path / 'out'}: cannot be read or written (File too large)")
    assert done.stdout.endswith("Free space or choose another output.\n")
    assert done.stdout.count("\n") == 1
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    assert _names(tmp_path) == ["a", "out"]
