# SPDX-License-Identifier: Apache-2.0
"""Write torch's index of a checkpoint, `.metadata`, so that the loaders of torch and megatron-core can read it.

Comes after the lists of all ranks are written. mindvl itself reads the table of chunk_table.py. The index is a pickle with
three objects for each chunk, several seconds of work for 280,000 chunks. `join_lists` does this in a process of its own,
because in a thread of rank 0 it would slow down training on every rank.
"""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import torch

from mindvl_train.checkpoints.chunk_table import TABLE, ChunkTable
from mindvl_train.errors import CheckpointError

INDEX = ".metadata"
# The opcodes that tensor_index.py allows are of this protocol; pickle's default depends on the Python version.
PROTOCOL = 4
_IN_PROCESS_BYTES = 2 << 20  # of lists; starting a process takes longer than joining fewer


def join_lists(lists: Path, tensors: Path, num_ranks: int) -> None:
    """Join the lists `RANK.index` of all ranks into the table and torch's index of a checkpoint.

    Raises:
        CheckpointError: The process that joins them failed.
        ValueError: A list is damaged.
    """
    if sum(path.stat().st_size for path in lists.glob("*.index")) <= _IN_PROCESS_BYTES:
        _join(lists, tensors, num_ranks)
        return
    command = [sys.executable, "-m", __name__, str(lists), str(tensors), str(num_ranks)]
    # Without devices: the variable keeps torch from loading the library of one.
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise CheckpointError(f"{tensors}: the index could not be written ({lines[-1][:300]}). Check the disk.")


def write_torch_index(directory: Path, table: ChunkTable) -> None:
    """Write `.metadata` of the chunks of a table."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    tensors: dict[str, TensorStorageMetadata] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    for key, rows in table.tensor_rows().items():
        dtype, shape = table.keys[key]
        described = TensorStorageMetadata(TensorProperties(dtype=getattr(torch, dtype)), torch.Size(shape), chunks=[])
        tensors[key] = described
        offsets, sizes = (numbers.tolist() for numbers in table.boxes(key, rows))
        for (_, file, start, length, crc32), offset, size in zip(
            table.rows[rows, :5].tolist(), offsets, sizes, strict=True
        ):
            at = torch.Size(offset)
            described.chunks.append(ChunkStorageMetadata(at, torch.Size(size)))
            info = _StorageInfo(table.files[file], start, length)
            info.__dict__["crc32"] = crc32  # an additional attribute, ignored by torch's reader
            stored[MetadataIndex(key, at)] = info
    (directory / INDEX).write_bytes(pickle.dumps(Metadata(dict(tensors), storage_data=stored), protocol=PROTOCOL))


def _join(lists: Path, tensors: Path, num_ranks: int) -> None:
    table = ChunkTable.read_all([lists / f"{rank:05d}.index" for rank in range(num_ranks)])
    table.write(tensors / TABLE)
    write_torch_index(tensors, table)


if __name__ == "__main__":
    _join(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
