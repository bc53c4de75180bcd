# SPDX-License-Identifier: Apache-2.0
"""Directories are read lazily and written as other tools read them; damage is named."""

import json

import pytest
import torch
from safetensors.torch import load_file

from mindvl_merge import DirectoryError
from mindvl_merge.directory import DirectoryWriter, ModelDirectory


@pytest.mark.parametrize("shards", [1, 3])
def test_headers_say_what_is_there(make_directory, random_tensors, shards):
    tensors = random_tensors(0)
    directory = ModelDirectory(make_directory("a", tensors, shards=shards))
    assert {name: info.shape for name, info in directory.tensors.items()} == {
        n: tuple(t.shape) for n, t in tensors.items()
    }
    assert torch.equal(directory.read_rows("language.embed", 2, 5), tensors["language.embed"][2:5])
    assert torch.equal(directory.read_rows("vision.scale", 0, 1), tensors["vision.scale"])
    assert len(directory.sha256()) == shards


@pytest.mark.parametrize(("max_bytes", "files"), [(10_000, 1), (64, 3)])
def test_what_is_written_is_read_by_safetensors(tmp_path, make_directory, random_tensors, max_bytes, files):
    tensors = {
        **random_tensors(0),
        "empty": torch.zeros(0, 3),
        "count": torch.tensor([1, 2]),
        "on": torch.tensor([True]),
    }
    source = ModelDirectory(make_directory("a", tensors))
    out = tmp_path / "out"
    out.mkdir()
    infos = list(source.tensors.values())
    with DirectoryWriter(out, infos, max_shard_bytes=max_bytes) as writer:
        for info in infos:
            for row in range(info.shape[0] if info.shape else 1):
                writer.write(source.read_rows(info.name, row, row + 1))
    written = {}
    for file in out.glob("*.safetensors"):
        written.update(load_file(file))
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensors[name]) for name in tensors)
    copy = ModelDirectory(out)
    assert len(copy.files) >= files
    assert copy.sha256() == writer.sha256
    if files > 1:
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in tensors.values())


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
