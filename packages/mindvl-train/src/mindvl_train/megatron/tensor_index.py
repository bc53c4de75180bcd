# SPDX-License-Identifier: Apache-2.0
"""The index of a checkpoint's tensors/: the file of each chunk of each tensor.

Comes after chunks are written (tensor_files.py) and before any is read. The index is torch's `.metadata`, so that the
loaders of torch and megatron-core can read our checkpoints. That file is a pickle, which can execute arbitrary code when
loaded. It is read here with an allow-list of opcodes and names: numbers, text, and the few classes that the writer uses.
"""

import io
import json
import os
import pickle
import pickletools
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

INDEX = ".metadata"
SUFFIX = ".distcp"  # of files with chunks
_PROTOCOL = 4  # the opcodes below are of this protocol; pickle's default depends on the Python version
_OPCODES = frozenset(
    (
        *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET", "NONE", "NEWTRUE", "NEWFALSE"),
        *("BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINUNICODE", "BINUNICODE"),
        *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS"),
        *("EMPTY_DICT", "SETITEM", "SETITEMS", "STACK_GLOBAL", "NEWOBJ", "REDUCE", "BUILD"),
    )
)
_NAMES = {
    metadata.__name__: frozenset(
        (
            *("ChunkStorageMetadata", "Metadata", "MetadataIndex", "TensorProperties", "TensorStorageMetadata"),
            "_MEM_FORMAT_ENCODING",
        )
    ),
    filesystem.__name__: frozenset(("_StorageInfo",)),
    "torch": frozenset(
        ("Size", "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
    ),
    "torch.serialization": frozenset(("_get_layout",)),
}


@dataclass(frozen=True)
class Chunk:
    """A written box of a tensor and its position in a file."""

    key: str
    whole: list[int]
    dtype: str  # such as "float32"
    offset: list[int]
    sizes: list[int]
    file: str
    start: int  # offset in the file in bytes
    length: int
    crc32: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint with its chunks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: list[Chunk] = field(default_factory=list)


def write_list(path: Path, chunks: Iterable[Chunk]) -> None:
    """Write the list of chunks of one rank atomically."""
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps([asdict(chunk) for chunk in chunks]))
    os.replace(unfinished, path)


def read_list(path: Path) -> list[Chunk]:
    """Read a list written by write_list."""
    return [Chunk(**chunk) for chunk in json.loads(path.read_text())]


def write_index(directory: Path, chunks: Iterable[Chunk]) -> None:
    """Write the index of the chunks of all ranks."""
    tensors: dict[str, TensorStorageMetadata] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    for chunk in chunks:
        described = tensors.setdefault(
            chunk.key,
            TensorStorageMetadata(
                TensorProperties(dtype=getattr(torch, chunk.dtype)), torch.Size(chunk.whole), chunks=[]
            ),
        )
        offset = torch.Size(chunk.offset)
        described.chunks.append(ChunkStorageMetadata(offset, torch.Size(chunk.sizes)))
        info = _StorageInfo(chunk.file, chunk.start, chunk.length)
        info.__dict__["crc32"] = chunk.crc32  # an additional attribute, ignored by torch's reader
        stored[MetadataIndex(chunk.key, offset)] = info
    content = pickle.dumps(Metadata(dict(tensors), storage_data=stored), protocol=_PROTOCOL)
    (directory / INDEX).write_bytes(content)
    # Files that megatron-core's loader requires in addition to torch's index.
    save_config(CheckpointingConfig("torch_dist"), str(directory))
    empty = io.BytesIO()  # torch.save into a file raises RuntimeError on a full disk
    torch.save({}, empty)
    (directory / "common.pt").write_bytes(empty.getvalue())


def read_index(directory: Path) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint by key; executes no code of the file.

    Raises:
        ValueError: The file was not written by `write_index`.
    """
    content = (directory / INDEX).read_bytes()
    try:
        for opcode, _, _ in pickletools.genops(content):
            if opcode.name not in _OPCODES:
                raise pickle.UnpicklingError(f"it contains the pickle opcode {opcode.name}, which is not allowed")
        return _tensors_of(_AllowListUnpickler(io.BytesIO(content)).load())
    except Exception as error:  # the unpickler can raise any exception on invalid input
        raise ValueError(f"{INDEX}: is not the index of a mindvl checkpoint: {error}") from error


class _AllowListUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _NAMES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it contains the name {module}.{name}, which is not allowed")


def _tensors_of(index: Any) -> dict[str, StoredTensor]:
    """Convert the unpickled index after a check of its structure."""
    _require(isinstance(index, Metadata), "it contains no Metadata")
    tensors: dict[str, StoredTensor] = {}
    for key, entry in index.state_dict_metadata.items():
        _require(isinstance(key, str) and isinstance(entry, TensorStorageMetadata), f"{key!r} is not a tensor")
        _require(isinstance(entry.properties.dtype, torch.dtype), f"{key}: no valid dtype")
        tensors[key] = StoredTensor(_sizes(entry.size), entry.properties.dtype)
    for entry_index, info in index.storage_data.items():
        key = entry_index.fqn
        _require(key in tensors, f"{key!r} is stored, but not described")
        tensors[key].chunks.append(_chunk(key, tensors[key], _sizes(entry_index.offset), info))
    for key, entry in index.state_dict_metadata.items():
        sizes = {_sizes(chunk.offsets): _sizes(chunk.sizes) for chunk in entry.chunks}
        for chunk in tensors[key].chunks:
            chunk.sizes.extend(sizes.pop(tuple(chunk.offset)))
            ends = [start + size for start, size in zip(chunk.offset, chunk.sizes, strict=True)]
            inside = all(end <= whole for end, whole in zip(ends, chunk.whole, strict=True))
            _require(inside, f"{key}: a chunk ends outside the tensor")
        _require(not sizes, f"{key}: a chunk is described, but not stored")
    return tensors


def _chunk(key: str, tensor: StoredTensor, offset: tuple[int, ...], info: Any) -> Chunk:
    """One chunk without its sizes."""
    name, start, length, crc32 = info.relative_path, info.offset, info.length, info.crc32
    plain = isinstance(name, str) and name.endswith(SUFFIX) and "/" not in name
    _require(plain, f"{name!r} is not the name of a {SUFFIX} file")
    numbers = (start, length, crc32)
    _require(
        all(isinstance(number, int) and 0 <= number < 1 << 62 for number in numbers),
        f"{name}: invalid position or checksum",
    )
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Chunk(key, list(tensor.shape), dtype, list(offset), [], name, start, length, crc32)


def _sizes(numbers: Any) -> tuple[int, ...]:
    _require(isinstance(numbers, torch.Size) and min(numbers, default=0) >= 0, f"{numbers!r} are not valid sizes")
    return tuple(numbers)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
