# SPDX-License-Identifier: Apache-2.0
"""Checkpoints appear whole or not at all, synchronously and asynchronously; old ones are pruned."""

import errno
import os
import pickle
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from mindvl_train import CheckpointConfig, CheckpointError, RunConfig, run_training
from mindvl_train.checkpoints.integrity import find_damage

pytestmark = pytest.mark.slow

Read = Callable[[Path], dict[str, torch.Tensor]]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_kill_between_tensors_and_rename_leaves_the_older_checkpoint_in_charge(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(steps=4, checkpoints=CheckpointConfig(every_steps=2))

    class Killed(BaseException):
        pass

    def killed(source: Any, target: Any) -> None:
        if str(target).endswith("step-00000004"):
            raise Killed
        rename(source, target)

    rename = os.replace
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", killed)
        with pytest.raises(Killed):
            run_training(config)
    directory = config.out / "checkpoints"
    assert names(directory) == ["step-00000002", "step-00000004.unfinished"]
    seen: list[int] = []
    run_training(config, on_step=lambda step, loss: seen.append(step))
    assert seen == [3, 4]
    assert names(directory) == ["step-00000002", "step-00000004"]


def test_only_the_newest_are_kept(make_config: Callable[..., RunConfig]) -> None:
    config = make_config(steps=5, checkpoints=CheckpointConfig(every_steps=1, keep_last=2))
    run_training(config)
    assert names(config.out / "checkpoints") == ["step-00000004", "step-00000005"]


def test_a_kill_while_an_old_one_is_removed_leaves_nothing_that_looks_complete(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def killed(path: Path, **options: Any) -> None:
        if "step-00000001" in path.name:
            raise Killed
        remove(path, **options)

    remove = shutil.rmtree
    config = make_config(steps=3, checkpoints=CheckpointConfig(every_steps=1, keep_last=1))
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", killed)
        with pytest.raises(Killed):
            run_training(config)
    assert names(config.out / "checkpoints") == ["step-00000001.dropped.unfinished", "step-00000002"]
    run_training(config)
    assert names(config.out / "checkpoints") == ["step-00000003"]


def test_those_at_certain_steps_are_kept_for_good(make_config: Callable[..., RunConfig]) -> None:
    config = make_config(steps=5, checkpoints=CheckpointConfig(every_steps=1, keep_last=1, keep_every_steps=2))
    run_training(config)
    assert names(config.out / "checkpoints") == ["step-00000002", "step-00000004", "step-00000005"]


def test_an_asynchronous_save_has_the_state_of_its_step(
    make_config: Callable[..., RunConfig], read_tensors: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mindvl_train.checkpoints import saving

    trained_on = threading.Event()

    class LateWriter(saving.ChunkWriter):
        def __enter__(self) -> "LateWriter":
            assert trained_on.wait(300)
            return self

    every = CheckpointConfig(every_steps=2, keep_last=5)
    expected = run_training(make_config("foreground", steps=4, checkpoints=every))
    config = make_config(steps=4, checkpoints=CheckpointConfig(every_steps=2, keep_last=5, async_save=True))
    seen: list[list[str]] = []

    def on_step(step: int, loss: float | None) -> None:
        if step == 3:
            seen.append(names(config.out / "checkpoints"))
            trained_on.set()

    monkeypatch.setattr(saving, "ChunkWriter", LateWriter)
    result = run_training(config, on_step=on_step)
    assert seen == [["step-00000002.unfinished"]]
    assert names(result.checkpoint.parent) == ["step-00000002", "step-00000004"]
    for name in names(result.checkpoint.parent):
        whole, beside = (read_tensors(out.checkpoint.with_name(name)) for out in (expected, result))
        assert whole.keys() == beside.keys()
        assert all(torch.equal(tensor, beside[key]) for key, tensor in whole.items())
        assert find_damage(result.checkpoint.with_name(name)) is None


def test_a_failed_asynchronous_save_ends_the_run_and_leaves_the_older_checkpoint(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mindvl_train.checkpoints import saving

    class FullDisk(saving.ChunkWriter):
        def add(self, piece: Any) -> None:
            if "step-00000002" in str(self._directory):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().add(piece)

    monkeypatch.setattr(saving, "ChunkWriter", FullDisk)
    config = make_config(steps=50, checkpoints=CheckpointConfig(every_steps=1, async_save=True))
    seen: list[int] = []
    message = r"step-00000002: could not be saved \(.*No space left on device\).* can resume from step-00000001"
    with pytest.raises(CheckpointError, match=message):
        run_training(config, on_step=lambda step, loss: seen.append(step))
    assert seen == [1, 2, 3]  # the next save met it
    assert names(config.out / "checkpoints") == ["step-00000001"]
    monkeypatch.undo()
    assert run_training(make_config(steps=2)).finished


@contextmanager
def one_process() -> Iterator[None]:
    from mindvl_model import set_up_device
    from mindvl_train.parallel_state import process_groups

    with process_groups(set_up_device(), seed=0):
        yield


def test_a_checkpoint_is_saved_although_an_older_one_cannot_be_removed(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from mindvl_train.checkpoints import saving

    def stuck(checkpoint: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(checkpoint))

    monkeypatch.setattr(saving, "_remove", stuck)
    config = make_config(steps=2, checkpoints=CheckpointConfig(every_steps=1, keep_last=1))
    assert run_training(config).checkpoint.is_dir()
    assert names(config.out / "checkpoints") == ["step-00000001", "step-00000002"]
    assert "step-00000002: saved, but an older checkpoint could not be removed" in caplog.text


def test_an_error_of_one_rank_in_a_save_is_raised_on_all(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mindvl_train.checkpoints import saving

    def broken(*arguments: object) -> dict[str, object]:
        raise KeyError("no such state")

    monkeypatch.setattr(saving, "manifest_of", broken)
    with pytest.raises(CheckpointError, match=r"could not be saved \(KeyError: 'no such state'\)"):
        run_training(make_config(steps=1))


def test_a_failed_save_asks_the_loop_to_stop_and_says_why_at_the_next_call(tmp_path: Path) -> None:
    from mindvl_train.checkpoints.saving import Saver, _Writing

    with one_process():
        saver = Saver(tmp_path, CheckpointConfig(async_save=True), {})
        writing = saver._writing = _Writing(tmp_path, CheckpointConfig(), "step-00000001")
        saver._thread = threading.Thread(target=writing.run, args=([], {}))  # its directory was never made
        saver._thread.start()
        saver._thread.join()
        assert saver.failed
        with pytest.raises(CheckpointError, match=r"could not be saved .*there is no older checkpoint"):
            saver.finish()
        assert not saver.failed
        saver.finish()  # once is enough


def test_a_checkpoint_gets_its_name_when_every_process_has_written(tmp_path: Path) -> None:
    from mindvl_train.checkpoints.saving import _Writing
    from mindvl_train.megatron.checkpoint import Piece

    def half(rank: int) -> Piece:
        return Piece("weight", (2, 3), (rank, 0), torch.full((1, 3), float(rank)))

    first, second = (_Writing(tmp_path, CheckpointConfig(), "step-00000007", rank, 2) for rank in range(2))
    (tmp_path / "step-00000003.unfinished").mkdir()  # of a run that was killed
    first.prepare()
    assert names(tmp_path) == ["step-00000007.unfinished"]
    thread = threading.Thread(target=first.run, args=([half(0)], {"manifest.json": {}}))
    thread.start()
    assert first.is_written.wait(300)
    thread.join(0.2)
    assert thread.is_alive()
    assert not first.final.exists()
    second.run([half(1)], {})
    thread.join(300)
    assert names(tmp_path) == ["step-00000007"]
    assert names(first.final) == ["files.json", "manifest.json", "tensors"]
    assert find_damage(first.final) is None

    alone = _Writing(tmp_path, CheckpointConfig(), "step-00000008", 0, 2, give_up_at=0.0)
    alone.prepare()
    alone.run([half(0)], {})
    assert alone.error == f"{alone.lists}: number of lists must be 2, got 1"
    assert names(tmp_path) == ["step-00000007", "step-00000008.unfinished"]


FULL_DISK = """
    import pickle, resource, sys
    from pathlib import Path
    from mindvl_train import CheckpointError, run_training

    for config in pickle.loads(Path(sys.argv[1]).read_bytes()):
        def on_step(step, loss):
            if step == 2:
                resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))

        try:
            run_training(config, on_step=on_step)
        except CheckpointError as error:
            print(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""


def test_a_full_disk_is_an_error_that_leaves_older_checkpoints_and_nothing_half(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:

    configs = [
        make_config(f"run-{beside}", steps=4, checkpoints=CheckpointConfig(every_steps=1, async_save=beside))
        for beside in (False, True)
    ]
    (tmp_path / "job").write_bytes(pickle.dumps(configs))
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FULL_DISK), str(tmp_path / "job")],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    lines = child.stdout.strip().splitlines()
    assert len(lines) == 2, child.stdout
    for config, line in zip(configs, lines, strict=True):
        assert "step-00000002: could not be saved" in line
        assert "File too large" in line
        assert "the run can resume from step-00000001" in line
        assert names(config.out / "checkpoints") == ["step-00000001"]
