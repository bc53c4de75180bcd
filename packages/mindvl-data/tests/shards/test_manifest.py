# SPDX-License-Identifier: Apache-2.0
"""Manifest: a shard that is not in it is refused by name, and so is every damage of its content."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mindvl_data import DataError, index_directory
from mindvl_data.shards.index import open_index
from mindvl_data.shards.sealed import seal


@pytest.fixture
def directory(shard_directories: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(shard_directories["images"], tmp_path / "copy"))


def content_of(directory: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((directory / "manifest.json").read_text())
    del content["checksum"]
    return content


def without(content: dict[str, Any], number: int) -> dict[str, Any]:
    """Without one shard, as somebody writes it who corrects the sums too."""
    lost = content["shards"].pop(number)
    return content | {name: content[name] - lost[name] for name in ("samples", "images", "videos", "bytes")}


def test_a_shard_that_was_added_after_indexing_is_refused_with_its_name_and_the_command(directory: Path) -> None:
    shutil.copy(directory / "shard-000000.tar", directory / "zebra.tar")
    with pytest.raises(DataError, match=r"zebra\.tar: the shard is not in manifest\.json.*`mindvl data index .*copy`"):
        open_index(directory)
    (directory / "zebra.tar").rename(directory / "zebra.tar.off")
    assert open_index(directory).num_samples == 60


def test_many_new_shards_are_counted_and_the_first_named(directory: Path) -> None:
    for number in range(5):
        (directory / f"new-{number}.tar").write_bytes(b"")
    with pytest.raises(DataError, match=r"new-0\.tar: .* \(5 in all: new-0\.tar, new-1\.tar, new-2\.tar, \.\.\.\)"):
        open_index(directory)


@pytest.mark.parametrize("number", [0, 2, 3])
def test_a_manifest_that_lost_a_shard_is_refused_even_where_its_sums_hold(directory: Path, number: int) -> None:
    lost = content_of(directory)["shards"][number]["name"]
    (directory / "manifest.json").write_bytes(seal(without(content_of(directory), number)))
    with pytest.raises(DataError, match=rf"{lost}: the shard is not in manifest\.json"):
        open_index(directory)
    (directory / lost).unlink()
    index = lost.replace(".tar", ".idx")
    with pytest.raises(
        DataError,
        match=rf"{index}: the index file belongs to a shard that is neither in .* nor in manifest\.json",
    ):
        open_index(directory)
    index_directory(directory)  # for somebody who wanted to remove it; the same command names what is there
    assert not (directory / index).exists()
    assert open_index(directory).num_samples == 60 - (16, 16, 16, 12)[number]


def test_the_index_files_of_other_programs_are_left_alone(directory: Path) -> None:
    (directory / "elsewhere.idx").write_text("v1.2 12")
    (directory / "directory.idx").mkdir()
    (directory / "shard-000000.tar.idx").write_bytes(b"\0" * 64)
    assert open_index(directory).num_samples == 60
    index_directory(directory, fresh=True)
    assert (directory / "elsewhere.idx").exists()
    assert (directory / "shard-000000.tar.idx").exists()


def test_a_shard_without_a_usable_sample_is_known_although_nothing_of_it_is_used(directory: Path) -> None:
    (directory / "broken.tar").write_bytes(b"x" * 1024)
    index_directory(directory, exclude_bad=True)
    assert content_of(directory)["empty_shards"] == ["broken.tar"]
    assert open_index(directory).num_samples == 60


Edit = Callable[[dict[str, Any]], Any]
EDITS: dict[str, tuple[Edit, str]] = {
    "no object": (lambda c: [c], "must be a JSON object, got list"),
    "no shards": (lambda c: c | {"shards": None}, "lists no shards"),
    "shards of another kind": (lambda c: c | {"shards": [3]}, "entry of a shard must be an object, got int"),
    "a path": (lambda c: c | {"shards": [c["shards"][0] | {"name": "../a.tar"}]}, "is not a file name of a shard"),
    "huge": (lambda c: c | {"shards": [c["shards"][0] | {"samples": 10**40}]}, "must be a count, got"),
    "negative": (lambda c: c | {"shards": [c["shards"][0] | {"bytes": -1}]}, "bytes of .* must be a count, got '-1'"),
    "not a number": (lambda c: c | {"images": float("nan")}, "images of the manifest must be a count, got 'nan'"),
    "a bool": (
        lambda c: c | {"shards": [c["shards"][0] | {"videos": True}]},
        "videos of .* must be a count, got 'True'",
    ),
    "no hash": (lambda c: c | {"shards": [c["shards"][0] | {"index_sha256": "ab"}]}, "has no valid index_sha256"),
    "sums": (lambda c: c | {"samples": 59}, "the samples of its shards add up to 60, expected 59"),
    "order": (lambda c: c | {"shards": c["shards"][::-1]}, "not unique and sorted by name"),
    "twice": (lambda c: c | {"shards": [c["shards"][0], *c["shards"]]}, "not unique and sorted by name"),
    "empty shards": (lambda c: c | {"empty_shards": "x"}, "`empty_shards` must be a list"),
}


@pytest.mark.parametrize("name", EDITS)
def test_damage_is_found_also_where_there_is_no_checksum(directory: Path, name: str) -> None:
    edit, what = EDITS[name]
    (directory / "manifest.json").write_text(json.dumps(edit(content_of(directory))))
    with pytest.raises(DataError, match=rf"manifest\.json is invalid: .*{what}.* Run `mindvl data index "):
        open_index(directory)
    index_directory(directory)
    assert open_index(directory).num_samples == 60


def test_any_edit_is_found_by_the_checksum(directory: Path) -> None:
    manifest = directory / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"decode_limit": 80000000', '"decode_limit": 80000001'))
    with pytest.raises(DataError, match="its checksum is wrong"):
        open_index(directory)


def test_what_cannot_be_read_is_one_sentence(directory: Path) -> None:
    (directory / "manifest.json").unlink()
    (directory / "manifest.json").mkdir()
    with pytest.raises(DataError, match=r"manifest\.json: the file cannot be read: Is a directory"):
        open_index(directory)
    (directory / "manifest.json").rmdir()
    (directory / "indexing.jsonl").write_text("{}")
    with pytest.raises(DataError, match="indexing has not finished"):
        open_index(directory)


def test_the_identity_is_the_hash_over_the_index_files(directory: Path) -> None:
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.glob("*.idx"))]
    assert open_index(directory).identity == hashlib.sha256("".join(digests).encode()).hexdigest()
