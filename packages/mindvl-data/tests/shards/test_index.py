# SPDX-License-Identifier: Apache-2.0
"""Index: what it holds, what it refuses by name."""

import json
from pathlib import Path

import pytest
from PIL import Image

from mindvl_data import DataError, index_folder
from mindvl_data.shards.index import key_of, open_index
from mindvl_data.shards.tar import ShardWriter

CHAT = json.dumps({"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}).encode()


def png(tmp_path: Path, height: int = 30, width: int = 40) -> bytes:
    Image.new("RGB", (width, height)).save(tmp_path / "p.png")
    return (tmp_path / "p.png").read_bytes()


def shard(tmp_path: Path, *members: tuple[str, bytes], name: str = "s.tar") -> Path:
    folder = tmp_path / "shards"
    folder.mkdir(exist_ok=True)
    with ShardWriter(folder / name) as writer:
        for member, content in members:
            writer.add(member, content)
    return folder


def test_the_index_holds_sizes_offsets_and_hashes(shard_folders: dict[str, Path]) -> None:
    index = open_index(shard_folders["pictures"])
    assert index.num_samples == 60
    assert not index.is_text
    assert [len(s.samples) for s in index.shards] == [16, 16, 16, 12]
    first = index.shards[0]
    assert int(first.samples["key_hash"][3]) == key_of("000000003")
    content = first.path.read_bytes()
    offset, length = int(first.members["offset"][0]), int(first.members["length"][0])
    assert "messages" in json.loads(content[offset : offset + length])
    images = first.members[first.members["height"] > 0]
    assert set(zip(images["height"].tolist(), images["width"].tolist(), strict=True)) <= {
        (56, 56), (56, 84), (84, 140), (30, 100),
    }  # fmt: skip
    assert open_index(shard_folders["text"]).is_text


def test_indexing_twice_gives_the_same_files(shard_folders: dict[str, Path]) -> None:
    folder = shard_folders["text"]
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    index_folder(folder)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_a_plain_caption_shard_of_others_is_indexed(tmp_path: Path) -> None:
    folder = shard(tmp_path, ("x.jpg", png(tmp_path)), ("x.txt", b"a cat"), ("y.txt", b"no picture"))
    index_folder(folder)
    assert open_index(folder).shards[0].samples["num_members"].tolist() == [2, 1]


def test_a_duplicate_key_is_refused_even_in_another_shard(tmp_path: Path) -> None:
    shard(tmp_path, ("a.json", CHAT), name="1.tar")
    folder = shard(tmp_path, ("b.json", CHAT), ("a.json", CHAT), name="2.tar")
    with pytest.raises(DataError, match=r"duplicate key 'a', already in 1\.tar.*2\.tar at byte 1024"):
        index_folder(folder)


def test_interleaved_members_are_refused(tmp_path: Path) -> None:
    folder = shard(tmp_path, ("a.json", CHAT), ("b.json", CHAT), ("a.0.png", png(tmp_path)))
    with pytest.raises(DataError, match="'a' has 0 records"):
        index_folder(folder)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("a.json", b"{broken")], "sample 'a': record cannot be read"),
        ([("a.json", b'{"messages": []}')], "at least one message"),
        ([("a.pkl", b"x")], "extension other than"),
        ([("a.json", CHAT), ("a.1.png", b"x")], "numbered"),
        ([("a.txt", b"a cat"), ("a.0.png", b"x")], "picture cannot be opened"),
        ([("a.json", CHAT), ("a.txt", b"x")], "2 records"),
        ([("a.txt", b"\xff\xfe")], "record cannot be read"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(tmp_path: Path, members: list[tuple[str, bytes]], message: str) -> None:
    folder = shard(tmp_path, *members)
    with pytest.raises(DataError, match=message) as caught:
        index_folder(folder)
    assert "s.tar at byte 0" in str(caught.value)
    assert not (folder / "manifest.json").exists()


def test_a_picture_the_text_does_not_mention_is_refused(tmp_path: Path) -> None:
    folder = shard(tmp_path, ("a.json", CHAT), ("a.0.png", png(tmp_path)))
    with pytest.raises(DataError, match="mentions 0 images, the sample has 1"):
        index_folder(folder)


def test_a_shard_that_changed_after_indexing_is_refused(tmp_path: Path) -> None:
    folder = shard(tmp_path, ("a.json", CHAT))
    index_folder(folder)
    shard(tmp_path, ("a.json", CHAT), ("b.json", CHAT))
    with pytest.raises(DataError, match="shard changed since it was indexed"):
        open_index(folder)


def test_a_damaged_index_is_refused(tmp_path: Path) -> None:
    folder = shard(tmp_path, ("a.json", CHAT))
    index_folder(folder)
    index_path = folder / "s.idx"
    index_path.write_bytes(index_path.read_bytes()[:-3])
    with pytest.raises(DataError, match="index file is damaged"):
        open_index(folder)
    index_path.unlink()
    with pytest.raises(DataError, match="missing"):
        open_index(folder)
