# SPDX-License-Identifier: Apache-2.0
"""The tensors/ of a checkpoint: chunks of tensors, written by several ranks and read by any.

Comes after checkpoint.py and convert.py, which provide the pieces. The format is that of torch.distributed.checkpoint
with megatron-core's names, so that both of their loaders can read it. torch's writer uses collectives, which must not
interleave with those of training; here each rank writes its chunks and a list of them, and one rank joins the lists
into an index (tensor_index.py).
"""

import io
import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory
from torch import Tensor

from mindvl_model import MindVLConfig, MindVLModel
from mindvl_model.adapters import LoRAConfig
from mindvl_model.megatron.adapters import add_adapters
from mindvl_model.megatron.blocks import BuildConfig
from mindvl_model.parameters import PARTS, Part, named_tensors
from mindvl_train.checkpoints.chunk_table import SUFFIX, Chunk
from mindvl_train.megatron.checkpoint import MASTER, Piece
from mindvl_train.megatron.tensor_index import StoredTensor, read_index, write_index


@dataclass(frozen=True)
class StoredParameter:
    """Position of a parameter in a checkpoint: layers of the same kind are stacked into one tensor."""

    key: str
    stack: tuple[int, ...]  # sizes of the axes before the parameter's own
    position: tuple[int, ...]  # index in these axes
    shape: tuple[int, ...]  # shape of the parameter
    dtype: torch.dtype


def stored_parameters(
    config: MindVLConfig, dtype: torch.dtype, lora: LoRAConfig | None = None, parts: Iterable[Part] = PARTS
) -> dict[str, StoredParameter]:
    """All parameters of a model in a checkpoint by name; requires the megatron-core groups of a single process.

    Args:
        lora: Adapters of the model.
        parts: Parts that have adapters.
    """
    with torch.device("meta"):
        model: Any = MindVLModel(config, BuildConfig(dtype=dtype))
        if lora is not None:
            add_adapters(model, config, lora, parts)
    held, stored = named_tensors(model), {}
    for name, entry in model.sharded_state_dict(metadata={"singleton_local_shards": False}).items():
        if isinstance(entry, ShardedObject):
            continue
        # A factory splits a gated matrix into halves; a single process has both, one after the other.
        first = entry.build()[0] if isinstance(entry, ShardedTensorFactory) else entry
        depth, tensor = first.prepend_axis_num, held[name]
        stored[name] = StoredParameter(
            first.key,
            tuple(first.global_shape[:depth]),
            tuple(first.global_offset[:depth]),
            tuple(tensor.shape),
            tensor.dtype,
        )
    return stored


class ChunkWriter:
    """Writes chunks into files `__RANK_NUMBER.distcp`; they are synced at the end of the with block.

    Args:
        file_bytes: Maximum size of a file; None: one file.
    """

    def __init__(self, directory: Path, rank: int = 0, file_bytes: int | None = None) -> None:
        self.chunks: list[Chunk] = []
        self._directory, self._rank, self._file_bytes = directory, rank, file_bytes
        self._count = 0
        self._file: BinaryIO | None = None

    def __enter__(self) -> "ChunkWriter":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._file is not None:
            self._finish_file(sync=kind is None)

    def add(self, piece: Piece) -> None:
        """Write one piece, from any device."""
        tensor = piece.content.detach().cpu()
        # torch.save would write the complete storage of a view.
        tensor = tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor
        if self._file is not None and self._file_bytes and self._file.tell() + tensor.nbytes > self._file_bytes:
            self._finish_file()
        if self._file is None:
            self._name = f"__{self._rank}_{self._count}{SUFFIX}"
            self._count += 1
            self._file = (self._directory / self._name).open("xb")
        start = self._file.tell()
        file = _ChecksumFile(self._file)
        try:
            torch.save(tensor, file)  # type: ignore[arg-type]  # only write is used
        except RuntimeError as error:  # torch raises it for any error of write
            raise file.error or error from None
        self.chunks.append(
            Chunk(
                piece.key,
                list(piece.whole),
                str(tensor.dtype).removeprefix("torch."),
                list(piece.offset),
                list(tensor.shape),
                self._name,
                start,
                self._file.tell() - start,
                file.crc32,
            )
        )

    def _finish_file(self, sync: bool = True) -> None:
        file, self._file = self._file, None
        assert file is not None
        with file:
            if sync:
                file.flush()
                os.fsync(file.fileno())


class _ChecksumFile:
    """A write-only file with the checksum of its content."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.crc32 = 0
        self.error: OSError | None = None

    def write(self, content: Any) -> int:
        self.crc32 = zlib.crc32(content, self.crc32)
        try:
            return self._file.write(content)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()


def write_tensors(
    directory: Path, stored: dict[str, StoredParameter], tensors: Iterable[tuple[str, int, Tensor]], file_bytes: int
) -> None:
    """Write parameters of a whole model into an existing directory, in files of at most file_bytes (or one tensor).

    Args:
        tensors: (name of a parameter, first row of this slice, slice [rows, ...]).
    """
    with ChunkWriter(directory, file_bytes=file_bytes) as writer:
        for name, first_row, tensor in tensors:
            parameter = stored[name]
            offset = (*parameter.position, *((first_row, *(0,) * (tensor.ndim - 1)) if tensor.ndim else ()))
            content = tensor.detach().to(parameter.dtype).contiguous()[(None,) * len(parameter.stack)]
            writer.add(Piece(parameter.key, (*parameter.stack, *parameter.shape), offset, content))
    write_index(directory, writer.chunks)


class ForeignTensorsError(Exception):
    """The checkpoint is intact, but of another model."""


class TensorReader:
    """Reads tensors of a checkpoint that was written by any number of ranks.

    Raises one of checkpoint.DAMAGE, a ForeignTensorsError, or an OSError for an I/O error.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tensors = read_index(directory)

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        """Every tensor of the checkpoint by key."""
        return self._tensors

    def read_tensor(self, key: str) -> Tensor:
        """Read a whole stored tensor; layers of the same kind are stacked."""
        stored = self._tensors[key]
        content = torch.empty(stored.shape, dtype=stored.dtype)
        self.fill([Piece(key, stored.shape, (0,) * len(stored.shape), content)])
        return content

    def read(self, stored: StoredParameter) -> Tensor:
        """Read one parameter."""
        content = torch.empty((*(1 for _ in stored.stack), *stored.shape), dtype=stored.dtype)
        offset = (*stored.position, *(0 for _ in stored.shape))
        self.fill([Piece(stored.key, (*stored.stack, *stored.shape), offset, content)])
        return content.reshape(stored.shape)

    @torch.no_grad()
    def fill(self, pieces: Sequence[Piece]) -> None:
        """Fill the contents of all pieces; each stored chunk is read at most once."""
        wanted: dict[str, list[Piece]] = {}
        for piece in pieces:
            wanted.setdefault(self._stored_key(piece), []).append(piece)
        for key, sharing in wanted.items():
            stored = self._tensors.get(key)
            whole = sharing[0].whole
            if stored is None:
                raise ForeignTensorsError(f"it has no {key}")
            if stored.shape != whole:
                raise ForeignTensorsError(f"{key} has shape {list(stored.shape)} instead of {list(whole)}")
            filled = 0
            touched: dict[int, list[Piece]] = {}  # by chunk
            for piece in sharing:
                for row in stored.overlapping(piece.offset, piece.content.shape):
                    touched.setdefault(row, []).append(piece)
            for row in sorted(touched):
                chunk = stored.table.chunk(row)
                content = self._load(chunk)
                for piece in touched[row]:
                    starts, ends = _intersection(piece, chunk)
                    taken = content[_slices(starts, ends, chunk.offset)]
                    piece.content[_slices(starts, ends, piece.offset)] = taken.to(piece.content.device)
                    filled += taken.numel()
            needed = sum(piece.content.numel() for piece in sharing)
            if filled != needed:
                raise ValueError(f"{key}: number of stored values must be {needed}, got {filled}")

    def _stored_key(self, piece: Piece) -> str:
        """The key of the piece in the checkpoint: fp32 weights are also their master weights and stored once."""
        if piece.key.startswith(MASTER) and piece.key not in self._tensors:
            return piece.key.removeprefix(MASTER)
        return piece.key

    def _load(self, chunk: Chunk) -> Tensor:
        with (self._directory / chunk.file).open("rb") as file:
            file.seek(chunk.start)
            held = os.fstat(file.fileno()).st_size - chunk.start
            content = file.read(max(0, min(chunk.length, held)))  # read() allocates the requested size first
        checksum = zlib.crc32(content)
        if len(content) != chunk.length or checksum != chunk.crc32:
            raise ValueError(
                f"{chunk.file}: {chunk.key} at byte {chunk.start} has a wrong checksum: {len(content)} of {chunk.length} bytes, "
                f"crc32 {checksum} instead of {chunk.crc32}"
            )
        tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        if not isinstance(tensor, Tensor) or list(tensor.shape) != chunk.sizes:
            raise ValueError(f"{chunk.file}: {chunk.key} at byte {chunk.start} is not a tensor of shape {chunk.sizes}")
        return tensor


def _intersection(piece: Piece, chunk: Chunk) -> tuple[list[int], list[int]]:
    """Start and end of the elements that piece and chunk share, along each axis of the global tensor."""
    starts = [max(one, other) for one, other in zip(piece.offset, chunk.offset, strict=True)]
    ends = [
        min(a + length, b + other)
        for a, length, b, other in zip(piece.offset, piece.content.shape, chunk.offset, chunk.sizes, strict=True)
    ]
    return starts, ends


def _slices(starts: Sequence[int], ends: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a - zero, b - zero) for a, b, zero in zip(starts, ends, origin, strict=True))
