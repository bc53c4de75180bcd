# SPDX-License-Identifier: Apache-2.0
"""The lists of ranks become one index, in this process or in another one, and torch's index describes the same chunks."""

from pathlib import Path

import pytest
from torch.distributed.checkpoint import FileSystemReader

from mindvl_train import CheckpointError
from mindvl_train.checkpoints import torch_index
from mindvl_train.checkpoints.chunk_table import TABLE, Chunk, ChunkTable
from mindvl_train.checkpoints.torch_index import INDEX, join_lists


def write_lists(directory: Path) -> list[Chunk]:
    chunks = [
        Chunk(
            f"layer.{number % 3}", [8, 4], "float32", [number // 3, 0], [1, 4], f"__{number % 2}_0.distcp", number, 9, 5
        )
        for number in range(24)
    ]
    for rank in range(2):
        ChunkTable.of(chunks[rank::2]).write(directory / f"{rank:05d}.index")
    return chunks[::2] + chunks[1::2]


@pytest.mark.slow  # starts a process
def test_another_process_writes_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lists", "here", "there"):
        (tmp_path / name).mkdir()
    chunks = write_lists(tmp_path / "lists")
    join_lists(tmp_path / "lists", tmp_path / "here", 2)
    monkeypatch.setattr(torch_index, "_IN_PROCESS_BYTES", 0)
    join_lists(tmp_path / "lists", tmp_path / "there", 2)
    for name in (TABLE, INDEX):
        assert (tmp_path / "here" / name).read_bytes() == (tmp_path / "there" / name).read_bytes()
    table = ChunkTable.read(tmp_path / "there" / TABLE)
    assert [table.chunk(row) for row in range(len(chunks))] == chunks
    theirs = FileSystemReader(tmp_path / "there").read_metadata()
    assert len(theirs.storage_data) == len(chunks)


@pytest.mark.slow  # starts a process
def test_the_error_of_the_other_process_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_lists(tmp_path)
    (tmp_path / "00001.index").write_bytes(b"mindvl-1 and nothing else")
    monkeypatch.setattr(torch_index, "_IN_PROCESS_BYTES", 0)
    with pytest.raises(CheckpointError, match=r"could not be written \(ValueError: 00001\.index: is not the index"):
        join_lists(tmp_path, tmp_path, 2)
