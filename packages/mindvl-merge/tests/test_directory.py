# SPDX-License-Identifier: Apache-2.0
"""Directories are read lazily, and damage is named."""

import json

import pytest

from mindvl_merge import DirectoryError
from mindvl_merge.directory import ModelDirectory


@pytest.mark.parametrize("shards", [1, 3])
def test_headers_say_what_is_there(make_directory, random_tensors, shards):
    tensors = random_tensors(0)
    directory = ModelDirectory(make_directory("a", tensors, shards=shards))
    assert {name: info.shape for name, info in directory.tensors.items()} == {
        n: tuple(t.shape) for n, t in tensors.items()
    }
    assert directory.read("language.embed", 2, 9).tolist() == tensors["language.embed"].flatten()[2:9].tolist()
    assert directory.read("vision.scale", 0, 1).tolist() == [tensors["vision.scale"].item()]
    assert len(directory.files) == shards


def test_a_hole_of_a_sparse_file_is_recognized(tmp_path):
    shape = (3, 1 << 20)
    text = json.dumps({"w": {"dtype": "U8", "shape": list(shape), "data_offsets": [0, 3 << 20]}}).encode()
    text += b" " * (4088 - len(text))
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(4096 + (3 << 20))
        file.seek(4096 + (1 << 20))
        file.write(b"\1" * 4096)
    with ModelDirectory(tmp_path) as directory:
        assert directory.is_hole("w", 0, 1 << 20)
        assert not directory.is_hole("w", 0, (1 << 20) + 1)
        assert directory.is_hole("w", 2 << 20, 3 << 20)
        assert directory.allocated_bytes("model.safetensors") < 1 << 20


def test_a_truncated_file_is_named(make_directory, random_tensors):
    path = make_directory("a", random_tensors(0)) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(DirectoryError, match=r"model\.safetensors: is not a complete safetensors file"):
        ModelDirectory(path.parent)
    path.write_bytes(b"")
    with pytest.raises(DirectoryError, match="is not a complete safetensors file"):
        ModelDirectory(path.parent)


def test_a_missing_directory_or_shard_is_named(tmp_path, make_directory, random_tensors):
    with pytest.raises(DirectoryError, match="nowhere: the directory does not exist"):
        ModelDirectory(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DirectoryError, match=r"no model\.safetensors"):
        ModelDirectory(tmp_path / "empty")
    path = make_directory("a", random_tensors(0), shards=2)
    (path / "part-1.safetensors").unlink()
    with pytest.raises(DirectoryError, match=r"part-1\.safetensors"):
        ModelDirectory(path)
