# SPDX-License-Identifier: Apache-2.0
"""Index: what it holds, what it refuses by name."""

import json
import random
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mindvl_data import DataError, index_directory
from mindvl_data.shards.index import open_index
from mindvl_data.shards.index_format import hash_key
from mindvl_data.shards.tar import ShardWriter

CHAT = json.dumps({"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}).encode()


def png(tmp_path: Path, height: int = 30, width: int = 40) -> bytes:
    Image.new("RGB", (width, height)).save(tmp_path / "p.png")
    return (tmp_path / "p.png").read_bytes()


def shard(tmp_path: Path, *members: tuple[str, bytes], name: str = "s.tar") -> Path:
    directory = tmp_path / "shards"
    directory.mkdir(exist_ok=True)
    with ShardWriter(directory / name) as writer:
        for member, content in members:
            writer.add(member, content)
    return directory


def test_the_index_holds_sizes_offsets_and_hashes(shard_directories: dict[str, Path]) -> None:
    index = open_index(shard_directories["images"])
    assert index.num_samples == 60
    assert not index.is_text
    assert [len(s.samples) for s in index.shards] == [16, 16, 16, 12]
    first = index.shards[0]
    assert int(first.samples["key_hash"][3]) == hash_key("000000003")
    content = first.path.read_bytes()
    offset, length = int(first.members["offset"][0]), int(first.members["length"][0])
    assert "messages" in json.loads(content[offset : offset + length])
    images = first.members[first.members["height"] > 0]
    assert set(zip(images["height"].tolist(), images["width"].tolist(), strict=True)) <= {
        (56, 56), (56, 84), (84, 140), (30, 100),
    }  # fmt: skip
    assert open_index(shard_directories["text"]).is_text


def test_a_shard_that_changed_after_indexing_is_refused(tmp_path: Path) -> None:
    directory = shard(tmp_path, ("a.json", CHAT))
    index_directory(directory)
    shard(tmp_path, ("a.json", CHAT), ("b.json", CHAT))
    with pytest.raises(DataError, match="shard changed since it was indexed"):
        open_index(directory)


def test_a_damaged_index_is_refused(tmp_path: Path) -> None:
    directory = shard(tmp_path, ("a.json", CHAT))
    index_directory(directory)
    index_path = directory / "s.idx"
    index_path.write_bytes(index_path.read_bytes()[:-3])
    with pytest.raises(DataError, match="index file is damaged"):
        open_index(directory)
    index_path.unlink()
    with pytest.raises(DataError, match="missing"):
        open_index(directory)


def test_a_directory_that_is_not_indexed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no index.*Run `mindvl data index"):
        open_index(shard(tmp_path, ("a.json", CHAT)))


def test_a_manifest_of_another_version_or_damaged_is_refused(tmp_path: Path) -> None:
    directory = shard(tmp_path, ("a.json", CHAT))
    index_directory(directory)
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest.pop("checksum")  # as older versions wrote it
    (directory / "manifest.json").write_text(json.dumps(manifest | {"version": 1}))
    with pytest.raises(DataError, match=f"the index has version 1, expected {manifest['version']}"):
        open_index(directory)
    (directory / "manifest.json").write_text(json.dumps(manifest)[:-9])
    with pytest.raises(DataError, match=r"manifest\.json is invalid"):
        open_index(directory)


def test_damage_inside_an_index_file_is_found_when_the_shard_is_used(tmp_path: Path) -> None:
    shard(tmp_path, ("a.json", CHAT), name="0.tar")
    directory = shard(tmp_path, ("b.json", CHAT), name="1.tar")
    index_directory(directory)
    content = (directory / "1.idx").read_bytes()
    (directory / "1.idx").write_bytes(b"OTHERMAG" + content[8:])
    index = open_index(directory)
    assert len(index.shards[0].samples) == 1
    with pytest.raises(DataError, match=r"1\.idx: the index file is damaged"):
        index.shards[1]


def test_shards_are_mapped_when_used_and_only_the_last_few_stay(shard_directories: dict[str, Path]) -> None:
    def mapped() -> list[str]:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return sorted(line.rsplit("/", 1)[1] for line in lines if str(shard_directories["images"]) in line)

    shards = open_index(shard_directories["images"], max_mapped=2).shards
    assert mapped() == []
    keys = [shards[number].samples["key_hash"].tolist() for number in (0, 1, 2, 0, 3)]
    assert mapped() == ["shard-000000.idx", "shard-000003.idx"]
    held = shards[1].samples
    assert [shards[number].samples["key_hash"].tolist() for number in (2, 3)] == [keys[2], keys[4]]
    assert held["key_hash"].tolist() == keys[1]  # arrays in use stay valid
    assert "shard-000001.idx" in mapped()


def test_shards_are_a_sequence_that_knows_sizes_without_opening_any(shard_directories: dict[str, Path]) -> None:
    shards = open_index(shard_directories["images"]).shards
    assert shards.sizes.tolist() == [16, 16, 16, 12]
    assert [shard.name for shard in shards] == list(shards.names)
    assert [shard.name for shard in shards[1:3]] == list(shards.names[1:3])
    assert shards[-1].name == shards.names[3]
    with pytest.raises(IndexError):
        shards[4]


def test_threads_may_use_one_index_at_once(shard_directories: dict[str, Path]) -> None:
    shards = open_index(shard_directories["images"], max_mapped=1).shards
    expected = [shard.samples["key_hash"].tolist() for shard in shards]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda number: shards[number % 4].samples["key_hash"].tolist(), range(200)))
    assert found == [expected[number % 4] for number in range(200)]


def test_a_directory_of_videos_alone_is_no_text(shard_directories: dict[str, Path]) -> None:
    index = open_index(shard_directories["text"])
    assert index.is_text
    assert not replace(index, num_videos=3).is_text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["manifest.json", "manifest.json without checksum", "shard-000001.idx"])
def test_random_damage_is_refused_or_changes_nothing(
    shard_directories: dict[str, Path], tmp_path: Path, name: str, damage: Callable[[bytes, random.Random], bytes]
) -> None:
    directory, generator = Path(shutil.copytree(shard_directories["images"], tmp_path / "copy")), random.Random(name)
    path = directory / name.split(" ", maxsplit=1)[0]
    if "without" in name:
        manifest = json.loads(path.read_text())
        del manifest["checksum"]
        path.write_text(json.dumps(manifest))

    def content() -> list[Any]:
        index = open_index(directory)
        arrays = [(shard.name, shard.samples.tobytes(), shard.members.tobytes()) for shard in index.shards]
        return [index.num_samples, index.num_images, index.num_videos, index.identity, arrays]

    whole, expected, refusals = path.read_bytes(), content(), []
    for _ in range(200):
        path.write_bytes(damage(whole, generator))
        try:
            assert content() == expected
        except DataError as error:
            refusals.append(str(error))
    assert len(refusals) > 80
    assert not [message for message in refusals if "\n" in message or len(message) > 500]
