# SPDX-License-Identifier: Apache-2.0
"""The index of a checkpoint is read without running what it contains, and is what torch reads."""

import io
import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, filesystem, metadata

from mindvl_model import set_up_device

set_up_device()
from mindvl_train.checkpoints.chunk_table import TABLE, Chunk  # noqa: E402
from mindvl_train.megatron.tensor_index import INDEX, read_index, write_index  # noqa: E402 - megatron-core

CHUNKS = [
    Chunk("decoder.weight", [3, 4], "bfloat16", [row, 0], [1, 4], f"__0_{row}.distcp", 100 * row, 77, 0xFFFFFFFF - row)
    for row in range(3)
] + [Chunk("head.scale", [], "float32", [], [], "__0_0.distcp", 1 << 40, 99, 5)]


def test_what_was_written_is_read_and_torch_reads_the_same(tmp_path: Path) -> None:
    write_index(tmp_path, CHUNKS)
    tensors = read_index(tmp_path)
    assert {key: (tensor.shape, tensor.dtype) for key, tensor in tensors.items()} == {
        "decoder.weight": ((3, 4), torch.bfloat16),
        "head.scale": ((), torch.float32),
    }
    assert [chunk for tensor in tensors.values() for chunk in tensor.chunks] == CHUNKS
    (tmp_path / TABLE).unlink()  # a checkpoint of an earlier version has torch's index only
    assert [chunk for tensor in read_index(tmp_path).values() for chunk in tensor.chunks] == CHUNKS
    theirs: Any = FileSystemReader(tmp_path).read_metadata()
    assert theirs.state_dict_metadata["decoder.weight"].size == torch.Size((3, 4))


class Payload:
    """Makes a directory when it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.place),)


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_foreign_index_runs_no_code(tmp_path: Path, protocol: int) -> None:
    ran = tmp_path / "ran"
    index = metadata.Metadata({}, planner_data=Payload(ran))
    (tmp_path / INDEX).write_bytes(pickle.dumps(index, protocol=protocol))
    with pytest.raises(ValueError, match=r"\.metadata: is not the index of a mindvl checkpoint: it "):
        read_index(tmp_path)
    assert not ran.exists()
    FileSystemReader(tmp_path).read_metadata()  # the payload is a real one
    assert ran.exists()


def test_names_inside_an_allowed_module_are_not_followed(tmp_path: Path) -> None:
    """`a.b` as a name walks attributes from protocol 4 on: `os` is one of filesystem's."""
    content = b"\x80\x04\x8c" + bytes([len(filesystem.__name__)]) + filesystem.__name__.encode()
    (tmp_path / INDEX).write_bytes(content + b"\x8c\x09os.system\x93\x8c\x04true\x85R.")
    with pytest.raises(
        ValueError, match=r"it contains the name torch\.distributed\.checkpoint\.filesystem\.os\.system"
    ):
        read_index(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"relative_path": "../../etc/__0_0.distcp"}, "not the name of a .distcp file"),
        ({"relative_path": 3}, "not the name of a .distcp file"),
        ({"offset": -1}, "invalid position"),
        ({"length": 1 << 70}, "invalid position"),
        ({"crc32": "5"}, "invalid position"),
    ],
)
def test_a_box_in_an_impossible_place_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    write_index(tmp_path, CHUNKS)
    (tmp_path / TABLE).unlink()
    index: Any = pickle.loads((tmp_path / INDEX).read_bytes())
    next(iter(index.storage_data.values())).__dict__.update(change)
    (tmp_path / INDEX).write_bytes(pickle.dumps(index, protocol=4))
    with pytest.raises(ValueError, match=message):
        read_index(tmp_path)


def test_a_box_outside_of_its_tensor_is_refused(tmp_path: Path) -> None:
    write_index(tmp_path, [Chunk("a", [2], "float32", [1], [2], "__0_0.distcp", 0, 9, 0)])
    with pytest.raises(ValueError, match="a chunk ends outside"):
        read_index(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "at_least"), [(TABLE, 500), (INDEX, 1000)])
def test_random_damage_is_one_kind_of_error(name: str, at_least: int, tmp_path: Path) -> None:
    write_index(tmp_path, CHUNKS)
    if name == INDEX:
        (tmp_path / TABLE).unlink()
    whole = (tmp_path / name).read_bytes()
    random_bytes = random.Random(7)
    refused = 0
    for _ in range(1500):
        damaged = bytearray(whole)
        for _ in range(random_bytes.choice((1, 1, 4))):
            damaged[random_bytes.randrange(len(damaged))] = random_bytes.randrange(256)
        file = io.BytesIO(damaged)
        file.truncate(random_bytes.choice((len(whole), random_bytes.randrange(len(whole)))))
        (tmp_path / name).write_bytes(file.getvalue())
        try:
            read_index(tmp_path)
        except ValueError:
            refused += 1
    assert refused > at_least
