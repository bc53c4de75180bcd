# SPDX-License-Identifier: Apache-2.0
"""Log file: whole lines only, whatever the disk does."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from mindvl_data import DataError
from mindvl_data.log_file import LogFile


def test_a_line_there_is_no_room_for_is_cut_off_and_can_be_tried_again(
    tmp_path: Path, room_for: Callable[[int], AbstractContextManager[None]]
) -> None:
    path = tmp_path / "new" / "a.jsonl"
    log = LogFile(path, "audit")
    log.append({"step": 1})
    with room_for(20):  # the second line fits in part
        for _ in range(2):
            with pytest.raises(
                DataError, match=r"a\.jsonl: the audit log cannot be written: File too large.*audit_log"
            ):
                log.append({"step": 2})
            assert path.read_text() == '{"step":1}\n'
    log.append({"step": 2})
    log.close()
    assert path.read_text() == '{"step":1}\n{"step":2}\n'


def test_a_line_that_an_interrupt_tore_is_cut_off_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    log = LogFile(path, "audit")
    log.append({"step": 1})
    file = log._file

    class Torn:
        def __getattr__(self, name: str) -> object:
            return getattr(file, name)

        def write(self, content: bytes) -> int:
            file.write(content[:4])
            raise KeyboardInterrupt

    monkeypatch.setattr(log, "_file", Torn())
    with pytest.raises(KeyboardInterrupt):
        log.append({"step": 2})
    monkeypatch.setattr(log, "_file", file)
    log.append({"step": 3})
    log.close()
    assert path.read_text() == '{"step":1}\n{"step":3}\n'


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file/a\.jsonl: the audit log cannot be written: .*data\.audit_log"):
        LogFile(tmp_path / "file" / "a.jsonl", "audit")


def test_a_new_file_is_on_disk_before_it_takes_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[object] = []
    fsync, replace = os.fsync, os.replace

    def recorded_fsync(descriptor: int) -> None:
        events.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def recorded_replace(source: Path, target: Path) -> None:
        events.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    path = tmp_path / "a.jsonl"
    log = LogFile(path, "audit")
    log.append({"step": 1})
    log.replace(tmp_path / "next", [b"first\n", b"second\n"])
    log.close()
    assert path.read_bytes() == b"first\nsecond\n"
    assert events.index(path.stat().st_ino) < events.index("replace")
