# SPDX-License-Identifier: Apache-2.0
"""The tensors/ of a checkpoint: boxes of tensors written by many processes, read by any.

Comes after checkpoint.py and conversion, which say what is where. The format is torch.distributed.checkpoint's under
megatron-core's names, so that both their loaders read it. Its own writer agrees on a plan by collectives, which must
not run beside those of training; here each process writes its boxes and a list of them, and one joins the lists into
an index (tensor_index.py).
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
from mindvl_model.megatron.blocks import BuildConfig
from mindvl_model.parameters import named_tensors
from mindvl_train.megatron.checkpoint import MASTER, Piece
from mindvl_train.megatron.tensor_index import SUFFIX, Chunk, StoredTensor, read_index, write_index


@dataclass(frozen=True)
class StoredParameter:
    """Where a parameter lies in a checkpoint: layers of one kind are stacked into one tensor."""

    key: str
    stack: tuple[int, ...]  # sizes of the axes before the parameter's own
    position: tuple[int, ...]  # in them
    shape: tuple[int, ...]  # of the parameter
    dtype: torch.dtype


def stored_parameters(config: MindVLConfig, dtype: torch.dtype) -> dict[str, StoredParameter]:
    """Everything a checkpoint holds of a model, by name; megatron-core's groups of one process must exist."""
    with torch.device("meta"):
        model: Any = MindVLModel(config, BuildConfig(dtype=dtype))
    held, places = named_tensors(model), {}
    for name, entry in model.sharded_state_dict(metadata={"singleton_local_shards": False}).items():
        if isinstance(entry, ShardedObject):
            continue
        # A factory cuts a gated matrix into halves; one process holds both, one after the other.
        first = entry.build()[0] if isinstance(entry, ShardedTensorFactory) else entry
        depth, tensor = first.prepend_axis_num, held[name]
        places[name] = StoredParameter(
            first.key,
            tuple(first.global_shape[:depth]),
            tuple(first.global_offset[:depth]),
            tuple(tensor.shape),
            tensor.dtype,
        )
    return places


class ChunkWriter:
    """Writes boxes into files of its own, `__RANK_NUMBER.distcp`; at the end of the with block they are on disk.

    Args:
        file_bytes: A file that would grow beyond this is followed by another one; None: one file.
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
        """Write one box; its content may lie on any device."""
        tensor = piece.content.detach().cpu()
        # A view of a larger storage would be saved with all of it.
        tensor = tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor
        if self._file is not None and self._file_bytes and self._file.tell() + tensor.nbytes > self._file_bytes:
            self._finish_file()
        if self._file is None:
            self._name = f"__{self._rank}_{self._count}{SUFFIX}"
            self._count += 1
            self._file = (self._directory / self._name).open("xb")
        start = self._file.tell()
        counted = _Counted(self._file)
        try:
            torch.save(tensor, counted)  # type: ignore[arg-type]  # it only writes
        except RuntimeError as error:  # torch's word for whatever went wrong in write
            raise counted.error or error from None
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
                counted.crc32,
            )
        )

    def _finish_file(self, sync: bool = True) -> None:
        file, self._file = self._file, None
        assert file is not None
        with file:
            if sync:
                file.flush()
                os.fsync(file.fileno())


class _Counted:
    """A file that is only written to, with the checksum of what went in."""

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
    directory: Path, places: dict[str, StoredParameter], tensors: Iterable[tuple[str, int, Tensor]], file_bytes: int
) -> None:
    """Write parameters of a whole model into an existing directory, in files of at most file_bytes (or one tensor).

    Args:
        tensors: Name of a parameter, first row of this piece of it, the piece [rows, ...].
    """
    with ChunkWriter(directory, file_bytes=file_bytes) as writer:
        for name, first_row, tensor in tensors:
            place = places[name]
            offset = (*place.position, *((first_row, *(0,) * (tensor.ndim - 1)) if tensor.ndim else ()))
            content = tensor.detach().to(place.dtype).contiguous()[(None,) * len(place.stack)]
            writer.add(Piece(place.key, (*place.stack, *place.shape), offset, content))
    write_index(directory, writer.chunks)


class ForeignTensorsError(Exception):
    """What is wanted is not what the checkpoint is made of: it is whole, and of another model."""


class TensorReader:
    """Boxes of a checkpoint that any number of processes wrote.

    What it raises is among checkpoint.DAMAGE, a ForeignTensorsError, or an OSError of a disk that does not answer.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tensors = read_index(directory)

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        """Every tensor of the checkpoint by key."""
        return self._tensors

    def read_tensor(self, key: str) -> Tensor:
        """A whole tensor, as it is stored: layers of one kind are stacked."""
        stored = self._tensors[key]
        content = torch.empty(stored.shape, dtype=stored.dtype)
        self.fill([Piece(key, stored.shape, (0,) * len(stored.shape), content)])
        return content

    def read(self, place: StoredParameter) -> Tensor:
        """One parameter."""
        content = torch.empty((*(1 for _ in place.stack), *place.shape), dtype=place.dtype)
        offset = (*place.position, *(0 for _ in place.shape))
        self.fill([Piece(place.key, (*place.stack, *place.shape), offset, content)])
        return content.reshape(place.shape)

    @torch.no_grad()
    def fill(self, pieces: Sequence[Piece]) -> None:
        """Fill the contents of all pieces; each stored box they touch is read once."""
        wanted: dict[str, list[Piece]] = {}
        for piece in pieces:
            wanted.setdefault(self._stored_key(piece), []).append(piece)
        for key, sharing in wanted.items():
            stored = self._tensors.get(key)
            whole = sharing[0].whole
            if stored is None:
                raise ForeignTensorsError(f"it has no {key}")
            if stored.shape != whole:
                raise ForeignTensorsError(f"{key} has shape {list(stored.shape)}, wanted {list(whole)}")
            filled = 0
            for chunk in stored.chunks:
                touched = [(piece, both) for piece in sharing if (both := _overlap(piece, chunk)) is not None]
                if touched:
                    content = self._load(chunk)
                    for piece, (starts, ends) in touched:
                        taken = content[_slices(starts, ends, chunk.offset)]
                        piece.content[_slices(starts, ends, piece.offset)] = taken.to(piece.content.device)
                        filled += taken.numel()
            needed = sum(piece.content.numel() for piece in sharing)
            if filled != needed:
                raise ValueError(f"{key}: {filled} of {needed} values are stored")

    def _stored_key(self, piece: Piece) -> str:
        """Where the weights are fp32 they are their own master weights, and stored once."""
        if piece.key.startswith(MASTER) and piece.key not in self._tensors:
            return piece.key.removeprefix(MASTER)
        return piece.key

    def _load(self, chunk: Chunk) -> Tensor:
        with (self._directory / chunk.file).open("rb") as file:
            file.seek(chunk.start)
            held = os.fstat(file.fileno()).st_size - chunk.start
            content = file.read(max(0, min(chunk.length, held)))  # read() makes room for all that it is asked for
        if len(content) != chunk.length or zlib.crc32(content) != chunk.crc32:
            raise ValueError(f"{chunk.file}: {chunk.key} at byte {chunk.start} is not what was written")
        tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        if not isinstance(tensor, Tensor) or list(tensor.shape) != chunk.sizes:
            raise ValueError(f"{chunk.file}: {chunk.key} at byte {chunk.start} is no tensor of {chunk.sizes} values")
        return tensor


def _overlap(piece: Piece, chunk: Chunk) -> tuple[list[int], list[int]] | None:
    """Where both lie in the whole tensor: first and last + 1 along each axis."""
    starts = [max(one, other) for one, other in zip(piece.offset, chunk.offset, strict=True)]
    ends = [
        min(a + length, b + other)
        for a, length, b, other in zip(piece.offset, piece.content.shape, chunk.offset, chunk.sizes, strict=True)
    ]
    return None if any(start >= end for start, end in zip(starts, ends, strict=True)) else (starts, ends)


def _slices(starts: Sequence[int], ends: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a - zero, b - zero) for a, b, zero in zip(starts, ends, origin, strict=True))
