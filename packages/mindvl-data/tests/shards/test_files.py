# SPDX-License-Identifier: Apache-2.0
"""Tests of reading shards: neighbours read together, files that change, many threads, every byte counted."""

import os
import random
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindvl_data.errors import DataError
from mindvl_data.shards import files as files_module
from mindvl_data.shards.files import ShardFiles, coalesce

CONTENT = random.Random(1).randbytes(100_000)


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "a.tar"
    path.write_bytes(CONTENT)
    return path


def test_neighbours_become_one_read_and_strangers_stay_apart() -> None:
    assert coalesce([(0, 1000), (1000, 1000)]) == [(0, 2000)]
    assert coalesce([(1020, 1000), (0, 1000), (90_000, 500)]) == [(0, 2020), (90_000, 90_500)]  # 2 % of 2500 is 50
    assert coalesce([(0, 1000), (1060, 1000), (2080, 1000)]) == [(0, 1000), (1060, 3080)]  # the smaller gap first
    assert coalesce([(10, 90), (10, 90), (50, 100)]) == [(10, 150)]
    assert coalesce([]) == []


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 400)), max_size=30))
def test_reads_cover_all_ranges_and_at_most_2_percent_more(ranges: list[tuple[int, int]]) -> None:
    wanted = {byte for offset, length in ranges for byte in range(offset, offset + length)}
    spans = coalesce(ranges)
    read = [byte for start, end in spans for byte in range(start, end)]
    assert wanted <= set(read)
    assert len(read) == len(set(read)) <= 1.02 * len(wanted)


def test_ranges_come_back_in_the_order_asked_and_every_byte_is_counted(shard: Path) -> None:
    files = ShardFiles()
    ranges = [(50_000, 1000), (0, 2000), (2010, 2000), (50_000, 1000), (99_999, 1), (7, 0)]
    assert files.read_ranges(shard, ranges) == [CONTENT[offset : offset + length] for offset, length in ranges]
    report = files.report()
    assert report["bytes_wanted"] == 1000 + 2000 + 2000 + 1000 + 1
    assert report["bytes_read"] == 4010 + 1000 + 1  # what is asked for twice is read once
    assert report["requests"] == 3
    assert files.read(str(shard), 5, 5) == CONTENT[5:10]
    files.close()


def test_reads_that_give_less_than_asked_are_repeated(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pread = os.pread
    monkeypatch.setattr(files_module.os, "pread", lambda file, length, offset: pread(file, min(length, 300), offset))
    assert ShardFiles().read(shard, 100, 1000) == CONTENT[100:1100]


def test_a_shard_that_shrinks_vanishes_or_is_no_file_is_named(shard: Path, tmp_path: Path) -> None:
    files = ShardFiles()
    files.read(shard, 0, 10)
    os.truncate(shard, 500)
    with pytest.raises(DataError, match=r"a\.tar at byte 400: expected 200 bytes, got 100; .*data index"):
        files.read(shard, 400, 200)
    with pytest.raises(DataError, match=r"none\.tar: the shard cannot be opened: No such file.*Restore it"):
        files.read(tmp_path / "none.tar", 0, 1)
    with pytest.raises(DataError, match=r"cannot be read: Is a directory"):
        files.read(tmp_path, 0, 1)


def test_a_slow_read_holds_no_one_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [tmp_path / name for name in ("slow", "fast")]
    for path in paths:
        path.write_bytes(b"content")
    files, entered, release, pread = ShardFiles(), threading.Event(), threading.Event(), os.pread

    def slow_pread(file: int, length: int, offset: int) -> bytes:
        if length == 7:
            entered.set()
            assert release.wait(60)
        return pread(file, length, offset)

    monkeypatch.setattr(files_module.os, "pread", slow_pread)
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(files.read(paths[0], 0, 7)))
    thread.start()
    assert entered.wait(60)
    assert files.read(paths[1], 0, 3) == files.read(paths[0], 0, 3) == b"con"
    files.close()  # the file in use is closed by its last user
    release.set()
    thread.join()
    assert found == [b"content"]


def test_many_threads_share_few_descriptors_and_leave_none_open(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.tar" for number in range(12)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * 1000)
    inodes = {path.stat().st_ino for path in paths}
    files, wrong, most = ShardFiles(max_open=3), [], []

    def read(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(150):
            number = draw.randrange(12)
            if files.read(paths[number], draw.randrange(900), 100) != bytes([number]) * 100:
                wrong.append(number)
            most.append(num_open(inodes))

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert max(most) <= 3 + 4 + 4  # kept open, in use, and opened again while they are counted
    assert files.report()["requests"] == 600
    files.close()
    assert num_open(inodes) == 0


def num_open(inodes: set[int]) -> int:
    """Number of descriptors of these files; those that earlier tests left may be closed at any time."""
    found = 0
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):
            found += os.fstat(int(name)).st_ino in inodes
    return found


def test_open_files_stay_below_the_limit_of_the_process(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module.resource, "getrlimit", lambda _: (64, 64))
    assert ShardFiles(max_open=256)._local._max_open == 8
    monkeypatch.setattr(files_module.resource, "getrlimit", lambda _: (files_module.resource.RLIM_INFINITY,) * 2)
    assert ShardFiles(max_open=256)._local._max_open == 256
