# SPDX-License-Identifier: Apache-2.0
"""Tests of the cache of ranges: damage, room, several processes, a directory that cannot be written."""

import multiprocessing
import os
import random
from pathlib import Path

import pytest

from mindvl_data.errors import DataError
from mindvl_data.shards.cache import CHECKSUM_BYTES, RangeCache


def files_of(directory: Path) -> list[Path]:
    return [path for path in (directory / "ranges").glob("*/*") if path.is_file()]


def test_a_range_comes_back_and_others_do_not(tmp_path: Path) -> None:
    RangeCache(tmp_path, 1000).put("s3://b/a", 5, b"hello")
    cache = RangeCache(tmp_path, 1000)  # another start
    assert cache.get("s3://b/a", 5, 5) == b"hello"
    assert [cache.get(*key) for key in (("s3://b/a", 5, 4), ("s3://b/a", 6, 5), ("s3://b/b", 5, 5))] == [None] * 3


@pytest.mark.parametrize("damage", [b"", b"x", b"0123456789abcdefhello", None])
def test_a_damaged_range_is_thrown_away(tmp_path: Path, damage: bytes | None) -> None:
    cache = RangeCache(tmp_path, 1000)
    cache.put("a", 0, b"hello")
    (path,) = files_of(tmp_path)
    path.write_bytes(bytes(21) if damage is None else damage)  # zeros: what a crash of the machine can leave
    assert cache.get("a", 0, 5) is None
    assert files_of(tmp_path) == []
    cache.put("a", 0, b"hello")
    assert cache.get("a", 0, 5) == b"hello"


def test_the_least_recently_used_ranges_make_room(tmp_path: Path) -> None:
    size = 100 + CHECKSUM_BYTES
    cache = RangeCache(tmp_path, 10 * size)
    for number in range(10):
        cache.put("a", number, bytes([number]) * 100)
        (path,) = [p for p in files_of(tmp_path) if p.read_bytes()[-1] == number]
        os.utime(path, ns=(number, number))
    assert cache.get("a", 0, 100) is not None  # now the newest
    cache.put("a", 10, bytes(100))
    kept = [number for number in range(11) if cache.get("a", number, 100) is not None]
    assert kept == [0, 3, 4, 5, 6, 7, 8, 9, 10]  # 90 % of the limit: nine of them


def test_what_is_larger_than_the_limit_is_not_kept(tmp_path: Path) -> None:
    cache = RangeCache(tmp_path, 100)
    cache.put("a", 0, bytes(100))
    assert files_of(tmp_path) == []


def fill(directory: Path, seed: int) -> None:
    cache, draw = RangeCache(directory, 20_000), random.Random(seed)
    for _ in range(150):
        number = draw.randrange(80)
        content = cache.get("a", number, 500 + number)
        assert content in (None, bytes([number]) * (500 + number))
        cache.put("a", number, bytes([number]) * (500 + number))


@pytest.mark.slow
def test_several_processes_share_a_directory_and_keep_its_limit(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=fill, args=(tmp_path, seed)) for seed in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    total = sum(path.stat().st_size for path in files_of(tmp_path))
    assert 10_000 < total <= 20_000
    assert not [path for path in files_of(tmp_path) if path.name.startswith(".")]


def test_a_lost_counter_is_made_again_from_what_is_there(tmp_path: Path) -> None:
    cache = RangeCache(tmp_path, 1000)
    cache.put("a", 0, bytes(400))
    (tmp_path / "ranges" / "bytes").unlink()
    cache.put("a", 1, bytes(400))
    cache.put("a", 2, bytes(400))
    assert sum(path.stat().st_size for path in files_of(tmp_path)) <= 1000


def test_a_directory_that_goes_away_or_cannot_be_written_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = RangeCache(tmp_path / "cache", 1000)
    os.replace(tmp_path / "cache", tmp_path / "moved")
    cache.put("a", 0, b"hello")
    assert cache.get("a", 0, 5) == b"hello"  # the directory was made again
    (tmp_path / "cache" / "ranges" / "x").write_text("")
    for number in range(256):  # every directory is a file: nothing can be kept
        path = tmp_path / "moved" / "ranges" / f"{number:02x}"
        path.write_text("")
    broken = RangeCache(tmp_path / "moved", 1000)
    broken.put("a", 0, b"hello")
    broken.put("a", 1, b"hello")
    assert broken.get("a", 0, 5) is None
    assert caplog.text.count("Nothing more is cached") == 1
    with pytest.raises(DataError, match=r"Correct store\.cache"):
        RangeCache(tmp_path / "moved" / "ranges" / "00", 1000)
