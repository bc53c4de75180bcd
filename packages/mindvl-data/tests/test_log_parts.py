# SPDX-License-Identifier: Apache-2.0
"""Parts of a log: closed, compressed and put in order, whatever a kill leaves; what is missing is named."""

import gzip
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mindvl_data import DataConfig, DataError, Loader, log_parts
from mindvl_data.audit_lines import read_log
from mindvl_data.ledger import verify
from mindvl_data.log_parts import closed_parts, log_files, next_path, part_path

pytestmark = pytest.mark.slow

MakeConfig = Callable[..., DataConfig]
State = dict[str, Any]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_parts, "PART_BYTES", 1500)


def run(config: DataConfig, steps: int, *, state: State | None = None) -> State:
    with Loader(config, global_batch_size=2, position_kind="rope") as loader:
        if state is not None:
            loader.load_state_dict(state)
        for _ in range(2 * steps):
            next(loader)
        result: State = json.loads(json.dumps(loader.state_dict()))
        return result


def steps_of(log: Path) -> list[Any]:
    return [(line.step, line.packs, line.tokens) for line in read_log(log) if line.kind == "packs"]


@pytest.fixture
def parts(make_config: MakeConfig, tmp_path: Path) -> tuple[DataConfig, Path, State, list[Any]]:
    """A run of 30 steps in several parts: configuration, log, state, and the steps of the same run in one file."""
    config = make_config(audit_log=tmp_path / "run" / "audit.jsonl", num_threads=0)
    state = run(config, 30)
    assert len(closed_parts(tmp_path / "run" / "audit.jsonl")) >= 3
    whole = tmp_path / "whole" / "audit.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_parts, "PART_BYTES", 1 << 30)
        run(make_config(audit_log=whole, num_threads=0), 30)
    assert not closed_parts(whole)
    return config, tmp_path / "run" / "audit.jsonl", state, steps_of(whole)


def problems(config: DataConfig, log: Path, state: State | None) -> list[str]:
    found: list[str] = verify(config, log, global_batch_size=2, state=state, num_processes=1)["verified"]["problems"]
    return found


def test_closed_parts_are_compressed_and_hold_what_one_file_would(
    parts: tuple[DataConfig, Path, State, list[Any]],
) -> None:
    config, log, state, whole = parts
    assert steps_of(log) == whole
    assert all(path.name.endswith(".jsonl.gz") for path in closed_parts(log))
    report = verify(config, log, global_batch_size=2, state=state, num_processes=1)
    assert (report["verified"]["problems"], report["verified"]["steps"]) == ([], 30)
    assert report["verified"]["samples"] == report["samples"]


def test_parts_are_planned_in_several_processes_with_the_same_verdict(
    parts: tuple[DataConfig, Path, State, list[Any]],
) -> None:
    config, log, state, _ = parts
    reported: list[tuple[int, int]] = []
    one, two = (
        verify(config, log, global_batch_size=2, state=state, num_processes=n, progress=lambda *at: reported.append(at))
        for n in (1, 2)
    )
    assert one == two
    assert reported[-1] == (30, 30)
    text = gzip.decompress(closed_parts(log)[1].read_bytes()).decode()
    lines = [json.loads(line) for line in text.splitlines()]
    lines[1]["packs"][0][0][3] += 1  # a sample is another one
    closed_parts(log)[1].write_bytes(
        gzip.compress("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode())
    )
    first, second = (verify(config, log, global_batch_size=2, state=state, num_processes=n)["verified"] for n in (1, 2))
    assert first == second
    assert any(f"step {lines[1]['step']}: pack 0 has" in problem for problem in first["problems"])


@pytest.mark.parametrize("back_to", [0, 1, 7, 15, 29])
def test_a_resumed_run_goes_back_into_any_part_and_ends_the_same(
    parts: tuple[DataConfig, Path, State, list[Any]], make_config: MakeConfig, back_to: int
) -> None:
    config, log, _, whole = parts
    if back_to:
        state = run(make_config(num_threads=0), back_to)
        run(config, 1, state=state)
        assert [step for step, _, _ in steps_of(log)] == list(range(1, back_to + 2))
        state = run(config, 30 - back_to, state=state)
    else:
        state = run(config, 30)  # the very same run, started anew
    assert steps_of(log) == whole
    assert problems(config, log, state) == []


def test_a_kill_at_any_call_that_changes_a_file_leaves_a_log_that_verifies(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before the n-th rename, removal or write of a rotation, of a compression and of going back."""
    log = tmp_path / "run" / "audit.jsonl"
    config = make_config(audit_log=log, num_threads=0)
    saved = run(make_config(num_threads=0), 4)

    class Killed(BaseException):
        pass

    left, killed = 0, True

    def counted(call: Any) -> Any:
        def count(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return call(*arguments, **options)

        return count

    class NoThread:
        def __init__(self, target: Any, args: Any, **_: Any) -> None:
            self.start = lambda: target(*args)

        def join(self, *_: Any) -> None: ...

    monkeypatch.setattr("mindvl_data.audit_log.threading.Thread", NoThread)
    for allowed in range(0, 200, 4):  # every fourth call, to be quick
        if not killed:
            break
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        killed, left = False, 10**9
        with pytest.MonkeyPatch.context() as patch:
            for name in ("rename", "replace", "fsync", "unlink"):
                patch.setattr(os, name, counted(getattr(os, name)))
            patch.setattr(Path, "unlink", counted(Path.unlink))
            loader = Loader(config, global_batch_size=2, position_kind="rope")
            try:
                left = allowed
                for _ in range(20):
                    next(loader)
                loader.load_state_dict(saved)  # back into the first part
                next(loader), next(loader)
            except Killed:
                killed = True
            loader._audit._file.close()  # type: ignore[union-attr]
        last = max((step for step, _, _ in steps_of(log)), default=0)
        assert [step for step, _, _ in steps_of(log)] == list(range(1, last + 1)), allowed
        assert problems(config, log, None) == [], allowed
        state = run(
            config, 8, state=saved if last >= 4 else None
        )  # the next start continues as if nothing had happened
        assert problems(config, log, state) == [], allowed
    assert 20 < allowed < 200


@pytest.mark.parametrize("what", ["first", "middle", "last", "newest", "emptied"])
def test_a_part_that_is_gone_is_named(parts: tuple[DataConfig, Path, State, list[Any]], what: str) -> None:
    config, log, state, _ = parts
    closed = closed_parts(log)
    gone = {"first": closed[0], "middle": closed[1], "last": closed[-1], "newest": log, "emptied": log}[what]
    gone.write_bytes(b"") if what == "emptied" else gone.unlink()
    with pytest.raises(DataError, match=gone.name.replace(".", r"\.")):
        verify(config, log, global_batch_size=2, state=state)


def test_a_damaged_compressed_part_is_named(parts: tuple[DataConfig, Path, State, list[Any]]) -> None:
    config, log, state, _ = parts
    part = closed_parts(log)[1]
    content = part.read_bytes()
    for damaged in (content[:-9], content[:100], b"no gzip", content[:60] + b"\0\0\0\0" + content[64:], b""):
        part.write_bytes(damaged)
        with pytest.raises(DataError, match=part.name.replace(".", r"\.")):
            verify(config, log, global_batch_size=2, state=state)


def test_a_line_without_end_is_refused_with_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_parts, "MAX_LINE_BYTES", 1000)
    log = tmp_path / "audit.jsonl"
    log.write_bytes(b'{"step":1,"packs":[' + b"[" * 5000)
    with pytest.raises(DataError, match=r"audit\.jsonl:1: the line does not end after 1001 bytes"):
        list(read_log(log))


def test_a_rotation_that_finds_no_room_is_tried_again(
    make_config: MakeConfig, tmp_path: Path, room_for: Callable[[int], Any], caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "audit.jsonl"
    config = make_config(audit_log=log, num_threads=0)
    next_path(log).mkdir()  # in the way
    state = run(config, 12)
    assert closed_parts(log) == []
    assert "current part of the log is continued" in caplog.text
    next_path(log).rmdir()
    run(config, 1, state=state)
    assert [path.name for path in log_files(log)] == ["audit.000001.jsonl.gz", "audit.jsonl"]
    assert part_path(log, 1).name == "audit.000001.jsonl"
