# SPDX-License-Identifier: Apache-2.0
"""Inconsistent headers and indexes raise errors; valid files are read as the safetensors library reads them."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindvl_model import WeightError
from mindvl_model.weights.directory import WeightDirectory, new_directory

SHAPES = {"w0": (4,), "w1": (2, 2), "w2": (), "w3": (0, 3), "w4": (3,)}
INDEX = "model.safetensors.index.json"


def make(path: Path, shards: int = 2) -> Path:
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "qwen3"}')
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    if shards == 1:
        save_file(tensors, path / "model.safetensors")
        return path
    places = {name: f"part-{number % shards}.safetensors" for number, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in tensors if places[name] == file}, path / file)
    (path / INDEX).write_text(json.dumps({"weight_map": places}))
    return path


def rewrite_header(path: Path, change: Any) -> None:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    text = change(content[8 : 8 + length])
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def rewrite_index(path: Path, **changes: Any) -> None:
    index = json.loads((path / INDEX).read_text())
    (path / INDEX).write_text(json.dumps({"weight_map": index["weight_map"] | changes}))


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/hostname", "a/b", "..", "", "a\x00b", "\x1b[2J", 5, None]
)
def test_an_index_may_only_name_files_of_its_directory(tmp_path: Path, name: Any) -> None:
    directory = make(tmp_path / "model")
    rewrite_index(directory, w0=name)
    with pytest.raises(WeightError, match=r"index\.json: tensor 'w0' .* not the name of a file") as caught:
        WeightDirectory(directory)
    assert str(caught.value).isprintable()


def test_index_and_files_must_name_the_same_tensors(tmp_path: Path) -> None:
    directory = make(tmp_path / "model")
    index = json.loads((directory / INDEX).read_text())
    del index["weight_map"]["w0"]
    (directory / INDEX).write_text(json.dumps(index))
    with pytest.raises(WeightError, match=r"part-0\.safetensors: tensor 'w0' is missing from"):
        WeightDirectory(directory)
    rewrite_index(directory, w0="part-0.safetensors")
    WeightDirectory(directory)
    (directory / "model.safetensors").write_bytes(b"")
    with pytest.raises(WeightError, match="contains two sets of weights"):
        WeightDirectory(directory)


def test_links_stay_in_the_directory_or_in_the_cache_of_hugging_face(tmp_path: Path) -> None:
    directory = make(tmp_path / "model", shards=1)
    (directory / "model.safetensors").rename(tmp_path / "elsewhere")
    (directory / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(WeightError, match=r"model\.safetensors: the symbolic link points outside the directory"):
        WeightDirectory(directory)
    cache = tmp_path / "snapshots" / "1f3"
    cache.mkdir(parents=True)
    (tmp_path / "blobs").mkdir()
    for name, source in (("config.json", directory / "config.json"), ("model.safetensors", tmp_path / "elsewhere")):
        shutil.copyfile(source, tmp_path / "blobs" / name)
        (cache / name).symlink_to(f"../../blobs/{name}")
    assert WeightDirectory(cache).names() == sorted(SHAPES)
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir(parents=True)
    shutil.copyfile(tmp_path / "elsewhere", blobs / "1f3")
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors").symlink_to(blobs / "1f3")
    assert WeightDirectory(directory).names() == sorted(SHAPES)


def test_control_characters_in_errors_of_the_library_are_escaped(tmp_path: Path) -> None:
    directory = make(tmp_path / "model", shards=1)
    rewrite_header(
        directory / "model.safetensors", lambda text: text.replace(b'"w0"', b'"\\u001b\\n"').replace(b"[4]", b"[5]")
    )
    with pytest.raises(WeightError, match="not a complete safetensors file") as caught:
        WeightDirectory(directory)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda text: text.replace(b'"w3":', b'"w3":{"dtype":"I8","shape":[0],"data_offsets":[0,0]},"w3":'),
            "'w3' is rep",
        ),
        (lambda text: text.replace(b'"w0"', b'"\\u202e"'), "has an invalid name or shape"),
        (lambda text: text.replace(b"[0,3]", b"[0,4611686018427387904]"), "has an invalid name or shape"),
        (lambda text: text.replace(b"[0,3]", json.dumps([0] * 40).encode()), "has an invalid name or shape"),
        (lambda text: text + b" " * 25_000_001, "header of 25000"),
    ],
)
def test_invalid_headers_that_the_library_accepts_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    directory = make(tmp_path / "model", shards=1)
    rewrite_header(directory / "model.safetensors", change)
    with pytest.raises(WeightError, match=rf"model\.safetensors: .*{message}"):
        WeightDirectory(directory)


@pytest.mark.parametrize("shards", [1, 2])
def test_damaged_files_raise_an_error_or_are_read_as_by_the_library(tmp_path: Path, shards: int) -> None:
    whole, draw, refused = make(tmp_path / "whole", shards), random.Random(shards), 0
    for number in range(150):
        directory = tmp_path / str(number)
        shutil.copytree(whole, directory)
        file = draw.choice(sorted(directory.glob("*safetensors*")))
        content = bytearray(file.read_bytes())
        edge = len(content) if file.suffix == ".json" else 8 + int.from_bytes(content[:8], "little")
        for _ in range(draw.choice([1, 1, 2])):
            content[draw.randrange(edge)] = draw.choice(b'0123456789[]{},":wF\\\x00\xff')
        if draw.random() < 0.1:
            del content[draw.randrange(len(content)) :]
        file.write_bytes(content)
        try:
            read = WeightDirectory(directory)
            found = {name: read.read(name) for name in read.names()}
        except WeightError as error:
            message = str(error)
        else:
            expected = {name: one for part in directory.glob("*.safetensors") for name, one in load_file(part).items()}
            assert found.keys() == expected.keys()
            assert all(
                one.view(torch.uint8).equal(expected[name].view(torch.uint8)) for name, one in found.items() if one.ndim
            )
            continue
        refused += 1
        assert str(directory) in message
        assert message.isprintable()
    assert refused > 100


def test_a_second_process_does_not_write_into_the_directory_of_the_first(tmp_path: Path) -> None:
    out = tmp_path / "model"
    with new_directory(out) as directory:
        (directory / "weights").write_text("first")
        with pytest.raises(WeightError, match=r"model: another process is writing it\. Wait"), new_directory(out):
            pass
    assert (out / "weights").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_a_killed_process_left_is_not_part_of_a_new_directory(tmp_path: Path) -> None:
    left = tmp_path / "model.unfinished" / "subdirectory"
    left.mkdir(parents=True)
    (left.parent / "weights").write_text("left")
    with new_directory(tmp_path / "model") as directory:
        (directory / "config").write_text("new")
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["config"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_directory_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fill() -> None:
        with new_directory(tmp_path / "model") as directory:
            (directory / "weights").write_text("half")
            raise OSError(28, "No space left on device")

    with pytest.raises(WeightError, match=r"model: cannot be written \(No space left on device\)"):
        fill()
    assert list(tmp_path.iterdir()) == []
