# SPDX-License-Identifier: Apache-2.0
"""Claim: one process at a time writes into a directory of shards; the others get an error that names it."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from mindvl_data import DataError, index_directory, write_shards
from mindvl_data.shards import indexing
from mindvl_data.shards.claim import CLAIM_NAME, claimed
from mindvl_data.shards.validation import Rules, ValidShard, validate_shard


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    (tmp_path / "text.jsonl").write_text("".join(f'{{"text": "line {n}"}}\n' for n in range(9)))
    write_shards(tmp_path / "text.jsonl", tmp_path / "shards", format="text", samples_per_shard=3)
    return tmp_path / "shards"


def test_no_one_else_writes_meanwhile_and_nothing_stays_behind(tmp_path: Path) -> None:
    refused = pytest.raises(DataError, match=rf"process {os.getpid()} on .* is writing or indexing .* directory\. Wait")
    with claimed(tmp_path), refused, claimed(tmp_path):
        pass
    assert not (tmp_path / CLAIM_NAME).exists()
    with claimed(tmp_path):
        pass


def test_a_second_index_run_is_refused_and_the_first_is_whole(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits, goes_on = threading.Event(), threading.Event()

    def slow(path: Path, rules: Rules) -> ValidShard:
        waits.set()
        assert goes_on.wait(30)
        return validate_shard(path, rules)

    monkeypatch.setattr(indexing, "validate_shard", slow)
    first = threading.Thread(target=index_directory, args=(shards,))
    first.start()
    try:
        assert waits.wait(30)
        for _ in range(2):
            with pytest.raises(DataError, match="is writing or indexing shards in this"):
                index_directory(shards)
        with pytest.raises(DataError, match="is writing or indexing shards in this"):
            write_shards(shards.parent / "text.jsonl", shards, format="text")
    finally:
        goes_on.set()
        first.join()
    assert index_directory(shards)["samples"] == 9


def test_the_claim_of_a_killed_process_is_gone(tmp_path: Path) -> None:
    ready, reported = os.pipe()
    child = os.fork()
    if not child:
        with claimed(tmp_path):
            os.write(reported, b"x")
            signal.pause()
    os.read(ready, 1)
    with pytest.raises(DataError, match=f"process {child} on"), claimed(tmp_path):
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with claimed(tmp_path):
        pass


def test_what_another_user_left_behind_can_be_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / CLAIM_NAME).write_text("process 1 on elsewhere")
    original = os.open

    def not_writable(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_RDWR:
            raise PermissionError(13, "Permission denied", str(path))
        return original(path, flags, mode)

    monkeypatch.setattr(os, "open", not_writable)
    with claimed(tmp_path):
        assert (tmp_path / CLAIM_NAME).exists()
        with pytest.raises(DataError, match="is writing or indexing shards in this"), claimed(tmp_path):
            pass
    assert not (tmp_path / CLAIM_NAME).exists()
