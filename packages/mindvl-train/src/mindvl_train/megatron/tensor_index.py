# SPDX-License-Identifier: Apache-2.0
"""The index of a checkpoint's tensors/: the file of each chunk of each tensor.

Comes after chunks are written (tensor_files.py) and before any is read. mindvl reads the table of
checkpoints/chunk_table.py. Beside it lies torch's `.metadata`, for the loaders of torch and megatron-core; earlier versions
wrote nothing else. That file is a pickle, which can execute arbitrary code when loaded. It is read here with an allow-list of
opcodes and names: numbers, text, and the few classes that the writer uses.
"""

import io
import pickle
import pickletools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from numpy.typing import NDArray
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from mindvl_train.checkpoints.chunk_table import SUFFIX, TABLE, Chunk, ChunkTable, require
from mindvl_train.checkpoints.torch_index import INDEX, write_torch_index

_OPCODES = frozenset(
    (
        *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET", "NONE", "NEWTRUE", "NEWFALSE"),
        *("BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINUNICODE", "BINUNICODE"),
        *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS"),
        *("EMPTY_DICT", "SETITEM", "SETITEMS", "STACK_GLOBAL", "NEWOBJ", "REDUCE", "BUILD"),
    )
)
_DTYPE_NAMES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
DTYPES = {name: getattr(torch, name) for name in _DTYPE_NAMES}
_NAMES = {
    metadata.__name__: frozenset(
        (
            *("ChunkStorageMetadata", "Metadata", "MetadataIndex", "TensorProperties", "TensorStorageMetadata"),
            "_MEM_FORMAT_ENCODING",
        )
    ),
    filesystem.__name__: frozenset(("_StorageInfo",)),
    "torch": frozenset(("Size", *_DTYPE_NAMES)),
    "torch.serialization": frozenset(("_get_layout",)),
}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint with its chunks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    table: ChunkTable
    rows: NDArray[np.int64]  # of the table
    offsets: NDArray[np.int64]  # [chunks, axes]
    ends: NDArray[np.int64]  # [chunks, axes]

    @property
    def chunks(self) -> list[Chunk]:
        """Every chunk, in the order of the index."""
        return [self.table.chunk(row) for row in self.rows.tolist()]

    def overlapping(self, offset: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """Rows of the table whose chunks share elements with a box of the tensor."""
        start = np.array(offset, np.int64)
        end = start + np.array(sizes, np.int64)
        shared = (np.maximum(self.offsets, start) < np.minimum(self.ends, end)).all(axis=1)
        found: list[int] = self.rows[shared].tolist()
        return found


def write_index(directory: Path, chunks: Iterable[Chunk]) -> None:
    """Write the indexes of the chunks of a single process."""
    table = ChunkTable.of(chunks)
    table.write(directory / TABLE)
    write_torch_index(directory, table)
    write_megatron_files(directory)


def write_megatron_files(directory: Path) -> None:
    """Write the files that megatron-core's loader requires in addition to torch's index."""
    save_config(CheckpointingConfig("torch_dist"), str(directory))
    empty = io.BytesIO()  # torch.save into a file raises RuntimeError on a full disk
    torch.save({}, empty)
    (directory / "common.pt").write_bytes(empty.getvalue())


def read_index(directory: Path) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint by key; executes no code of the file.

    Raises:
        ValueError: The index is damaged, or was not written by mindvl.
    """
    table = (
        ChunkTable.read(directory / TABLE)
        if (directory / TABLE).exists()
        else ChunkTable.of(_chunks_of_torch_index(directory))
    )
    tensors = {}
    for key, rows in table.tensor_rows().items():
        dtype, shape = table.keys[key]
        require(dtype in DTYPES, f"{TABLE}: is not the index of a mindvl checkpoint: {key} has no valid dtype")
        offsets, sizes = table.boxes(key, rows)
        tensors[key] = StoredTensor(shape, DTYPES[dtype], table, rows, offsets, offsets + sizes)
    return tensors


def _chunks_of_torch_index(directory: Path) -> list[Chunk]:
    """The chunks of a checkpoint that has torch's index only, as earlier versions wrote them."""
    content = (directory / INDEX).read_bytes()
    try:
        for opcode, _, _ in pickletools.genops(content):
            if opcode.name not in _OPCODES:
                raise pickle.UnpicklingError(f"it contains the pickle opcode {opcode.name}, which is not allowed")
        return _chunks_of(_AllowListUnpickler(io.BytesIO(content)).load())
    except Exception as error:  # the unpickler can raise any exception on invalid input
        raise ValueError(f"{INDEX}: is not the index of a mindvl checkpoint: {error}") from error


class _AllowListUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _NAMES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it contains the name {module}.{name}, which is not allowed")


def _chunks_of(index: Any) -> list[Chunk]:
    """Convert the unpickled index after a check of its structure."""
    require(isinstance(index, Metadata), "it contains no Metadata")
    chunks: dict[str, list[Chunk]] = {}
    for key, entry in index.state_dict_metadata.items():
        require(isinstance(key, str) and isinstance(entry, TensorStorageMetadata), f"{key!r} is not a tensor")
        require(isinstance(entry.properties.dtype, torch.dtype), f"{key}: no valid dtype")
        chunks[key] = []
    for entry_index, info in index.storage_data.items():
        key = entry_index.fqn
        require(key in chunks, f"{key!r} is stored, but not described")
        entry = index.state_dict_metadata[key]
        chunks[key].append(_chunk(key, _sizes(entry.size), entry.properties.dtype, _sizes(entry_index.offset), info))
    for key, entry in index.state_dict_metadata.items():
        sizes = {_sizes(chunk.offsets): _sizes(chunk.sizes) for chunk in entry.chunks}
        for chunk in chunks[key]:
            chunk.sizes.extend(sizes.pop(tuple(chunk.offset)))
            ends = [start + size for start, size in zip(chunk.offset, chunk.sizes, strict=True)]
            inside = all(end <= whole for end, whole in zip(ends, chunk.whole, strict=True))
            require(inside, f"{key}: a chunk ends outside the tensor")
        require(not sizes, f"{key}: a chunk is described, but not stored")
    return [chunk for held in chunks.values() for chunk in held]


def _chunk(key: str, shape: tuple[int, ...], dtype: torch.dtype, offset: tuple[int, ...], info: Any) -> Chunk:
    """One chunk without its sizes."""
    name, start, length, crc32 = info.relative_path, info.offset, info.length, info.crc32
    plain = isinstance(name, str) and name.endswith(SUFFIX) and "/" not in name
    require(plain, f"{name!r} is not the name of a {SUFFIX} file")
    numbers = (start, length, crc32)
    require(
        all(isinstance(number, int) and 0 <= number < 1 << 62 for number in numbers),
        f"{name}: invalid position or checksum",
    )
    named = str(dtype).removeprefix("torch.")
    return Chunk(key, list(shape), named, list(offset), [], name, start, length, crc32)


def _sizes(numbers: Any) -> tuple[int, ...]:
    require(isinstance(numbers, torch.Size) and min(numbers, default=0) >= 0, f"{numbers!r} are not valid sizes")
    return tuple(numbers)
