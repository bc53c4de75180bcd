# SPDX-License-Identifier: Apache-2.0
"""Known: what an earlier call of indexing left is used where it is whole, and read again where it is damaged."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mindvl_data import DataError, index_directory
from mindvl_data.shards.known import begin_indexing, is_current, known_entries
from mindvl_data.shards.validation import Rules

RULES = Rules(decode_limit=80_000_000, exclude_bad=False, decode=False)


@pytest.fixture
def directory(shard_directories: dict[str, Path], tmp_path: Path) -> Path:
    copy = Path(shutil.copytree(shard_directories["text"], tmp_path / "copy"))
    for left in (*copy.glob("*.len"), *copy.glob("demand-*")):
        left.unlink()
    index_directory(copy)
    return copy


def stop_after(directory: Path, num_shards: int) -> Path:
    """What a call leaves that was stopped after so many shards."""
    entries = known_entries(directory, RULES)
    begin_indexing(directory, RULES, [entries[name] for name in sorted(entries)[:num_shards]])
    return directory / "indexing.jsonl"


def test_a_stopped_call_continues_where_it_was(directory: Path) -> None:
    stopped = stop_after(directory, 2)
    assert sorted(known_entries(directory, RULES)) == ["shard-000000.tar", "shard-000001.tar"]
    stopped.write_bytes(stopped.read_bytes()[:-20])
    assert sorted(known_entries(directory, RULES)) == ["shard-000000.tar"]


def test_an_entry_whose_counts_are_not_those_of_the_index_file_is_read_again(directory: Path) -> None:
    path = directory / "shard-000000.tar"
    entry = known_entries(directory, RULES)[path.name]
    assert is_current(path, entry)
    entry.facts["samples"] += 1
    assert not is_current(path, entry)


def test_lines_that_no_one_could_write_again_are_not_thrown_away(directory: Path) -> None:
    excluded = directory / "excluded.jsonl"
    excluded.write_text('{"file": "a.json", "row": 3, "reason": "x"}\n[1]\n')
    with pytest.raises(DataError, match=r"excluded\.jsonl:2: the line must be an object, got list\. Restore"):
        index_directory(directory)
    excluded.write_text('{"file": "a.json", "row": 3, "reason": "x"}\n')
    index_directory(directory)
    assert json.loads(excluded.read_text())["row"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["manifest.json", "shard-000001.idx", "indexing.jsonl"])
def test_after_any_damage_the_next_call_makes_what_a_first_call_makes(
    directory: Path, tmp_path: Path, name: str, damage: Callable[[bytes, random.Random], bytes]
) -> None:
    expected = {path.name: path.read_bytes() for path in directory.glob("*") if path.suffix != ".tar"}
    generator = random.Random(name)
    for number in range(60):
        if name == "indexing.jsonl":
            stop_after(directory, 1 + number % 3)
        path = directory / name
        path.write_bytes(damage(path.read_bytes(), generator))
        if number % 2 and name == "manifest.json":
            os.truncate(path, path.stat().st_size // 2)
        index_directory(directory)
        assert {path.name: path.read_bytes() for path in directory.glob("*") if path.suffix != ".tar"} == expected
