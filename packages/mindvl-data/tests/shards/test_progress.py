# SPDX-License-Identifier: Apache-2.0
"""The mark of an unfinished write."""

import os
from pathlib import Path

import pytest

from mindvl_data import DataError
from mindvl_data.shards.progress import Done, WriteMark, source_identity

DONE = Done(shards=2, rows=9, samples=8, excluded=1, excluded_bytes=70)


def mark(directory: Path, files: int = 1, **options: object) -> WriteMark:
    return WriteMark(directory, {"files": files}, {"format": "text", **options})


def test_a_mark_says_where_to_continue_and_refuses_another_write_by_name(tmp_path: Path) -> None:
    assert mark(tmp_path).load() == Done()
    mark(tmp_path).save(DONE)
    assert mark(tmp_path).load() == DONE
    with pytest.raises(DataError, match=r"source files was 1, got 2; options format was 'text', got 'llava'"):
        mark(tmp_path, files=2, format="llava").load()
    mark(tmp_path).remove()
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_lost_by_starting_over_before_the_first_shard(tmp_path: Path) -> None:
    mark(tmp_path).save(Done())
    assert mark(tmp_path, files=2).load() == Done()
    (tmp_path / "writing").write_text("half of a ma")
    assert mark(tmp_path).load() == Done()


def test_a_source_is_known_by_names_sizes_and_times(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    before = source_identity(tmp_path)
    assert before == source_identity(tmp_path)
    assert (before["files"], before["bytes"]) == (1, 1)
    os.utime(tmp_path / "a", ns=(5, 5))
    touched = source_identity(tmp_path)
    (tmp_path / "a").rename(tmp_path / "b")
    os.utime(tmp_path / "b", ns=(5, 5))
    assert len({each["digest"] for each in (before, touched, source_identity(tmp_path))}) == 3
