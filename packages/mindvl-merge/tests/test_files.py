# SPDX-License-Identifier: Apache-2.0
"""Names, symbolic links and special files of a directory that somebody else wrote."""

import json
import os

import pytest

from mindvl_merge import DirectoryError, MergeConfig, merge
from mindvl_merge.directory import ModelDirectory
from mindvl_merge.files import MAX_JSON_BYTES, is_plain_name, read_json, same_bytes


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/b", "a\\b", "..", ".", "", "a\x00b", "\x1b[2J", 5, None, "x" * 300]
)
def test_only_plain_names_are_names(make_directory, random_tensors, name):
    assert not is_plain_name(name)
    path = make_directory("a", random_tensors(0), shards=2)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    index["weight_map"]["vision.scale"] = name
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        DirectoryError, match=r"index\.json: the file of tensor 'vision\.scale' .* not a plain file name"
    ) as caught:
        ModelDirectory(path)
    assert str(caught.value).isprintable()


def test_a_link_that_leaves_the_directory_is_not_followed(tmp_path, make_directory, random_tensors):
    path = make_directory("a", random_tensors(0))
    secret = tmp_path / "secret.txt"
    secret.write_text("mine")
    (path / "notes.txt").symlink_to(secret)
    with pytest.raises(DirectoryError, match=r"notes\.txt: the symbolic link leaves the directory, to .*secret\.txt"):
        merge(MergeConfig(models=(path,), out=tmp_path / "out"))
    (path / "notes.txt").unlink()
    (path / "notes").symlink_to(tmp_path)
    with pytest.raises(DirectoryError, match=r"notes: this directory is a symbolic link"):
        merge(MergeConfig(models=(path,), out=tmp_path / "out"))
    (path / "notes").unlink()
    (path / "model.safetensors").rename(tmp_path / "elsewhere")
    (path / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DirectoryError, match=r"model\.safetensors: the symbolic link leaves the directory"):
        ModelDirectory(path)


def test_links_of_the_hugging_face_cache_are_files(tmp_path, make_directory, random_tensors):
    path = make_directory("a", random_tensors(0))
    snapshot, blobs = tmp_path / "cache" / "snapshots" / "1f3", tmp_path / "cache" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in path.iterdir():
        file.rename(blobs / file.name)
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    merge(MergeConfig(models=(snapshot,), out=tmp_path / "out"))
    assert not (tmp_path / "out" / "config.json").is_symlink()
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_links_from_anywhere_into_the_hugging_face_cache_are_files(tmp_path, make_directory, random_tensors):
    path, blobs = make_directory("a", random_tensors(0)), tmp_path / "hub" / "models--a--b" / "blobs"
    blobs.mkdir(parents=True)
    (path / "model.safetensors").rename(blobs / "1f3")
    (path / "model.safetensors").symlink_to(blobs / "1f3")
    assert ModelDirectory(path).files == ["model.safetensors"]


def test_what_is_no_file_is_not_opened(tmp_path, make_directory, random_tensors):
    path = make_directory("a", random_tensors(0))
    os.mkfifo(path / "pipe")
    with pytest.raises(DirectoryError, match=r"pipe: is not a regular file"):
        merge(MergeConfig(models=(path,), out=tmp_path / "out"))
    (path / "pipe").unlink()
    (path / "config.json").unlink()
    os.mkfifo(path / "config.json")
    with pytest.raises(DirectoryError, match=r"config\.json: is not a regular file"):
        merge(MergeConfig(models=(path, path), out=tmp_path / "out"))


def test_json_is_read_up_to_a_size(tmp_path):
    path = tmp_path / "x.json"
    with open(path, "wb") as file:
        file.truncate(MAX_JSON_BYTES + 1)
    with pytest.raises(DirectoryError, match=rf"x\.json: has {MAX_JSON_BYTES + 1} bytes, the limit is"):
        read_json(path)


def test_index_and_files_must_name_the_same_tensors(make_directory, random_tensors):
    path = make_directory("a", random_tensors(0), shards=2)
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())

    def with_map(change):
        changed = dict(index["weight_map"])
        change(changed)
        file.write_text(json.dumps(index | {"weight_map": changed}))

    with_map(lambda names: names.pop("vision.scale"))
    with pytest.raises(DirectoryError, match=r"part-1\.safetensors: tensor 'vision\.scale' is missing from"):
        ModelDirectory(path)
    with_map(lambda names: names.update(gone="part-1.safetensors"))
    with pytest.raises(DirectoryError, match=r"tensor 'gone' should be in part-1\.safetensors but is in no file"):
        ModelDirectory(path)
    with_map(lambda names: names.update({"vision.scale": "part-0.safetensors"}))
    with pytest.raises(DirectoryError, match=r"'vision\.scale' should be in part-0\.safetensors but is in part-1"):
        ModelDirectory(path)
    with_map(lambda names: None)
    (path / "model.safetensors").write_bytes(b"")
    with pytest.raises(DirectoryError, match=r"the weights are ambiguous"):
        ModelDirectory(path)


def test_files_are_the_same_by_their_bytes(tmp_path):
    for name, content in {"a": b"x" * 200_000, "b": b"x" * 200_000, "c": b"x" * 199_999 + b"y", "d": b"x"}.items():
        (tmp_path / name).write_bytes(content)
    assert [same_bytes(tmp_path / "a", tmp_path / name) for name in ("b", "c", "d", "gone")] == [
        True,
        False,
        False,
        False,
    ]
