# SPDX-License-Identifier: Apache-2.0
"""One parameter at a time to and from the tensors/ of a checkpoint, without a model in memory.

Conversion's side of checkpoint.py: the same files (torch.distributed.checkpoint, megatron-core's names and places), one
process. torch's own writer keeps every tensor until its file is closed, so files are written here.
"""

import math
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.utils import _create_file_view

from mindvl_model import MindVLConfig, MindVLModel
from mindvl_model.megatron.blocks import Layout
from mindvl_model.parameters import named_tensors
from mindvl_train.megatron.checkpoint import SHARDING, SaveInProcess


@dataclass(frozen=True)
class Place:
    """Where a parameter lies in a checkpoint: layers of one kind are stacked into one tensor."""

    key: str
    stack: tuple[int, ...]  # sizes of the axes before the parameter's own
    position: tuple[int, ...]  # in them
    shape: tuple[int, ...]  # of the parameter
    dtype: torch.dtype


@dataclass(frozen=True)
class ModelPlaces:
    """Everything a checkpoint of a model holds: parameters by name, and what is not a tensor."""

    places: dict[str, Place]
    objects: dict[str, ShardedObject]


def places_of(config: MindVLConfig, dtype: torch.dtype) -> ModelPlaces:
    """From a model without storage; megatron-core's groups of one process must exist."""
    with torch.device("meta"):
        model: Any = MindVLModel(config, Layout(dtype=dtype))
    held, places, objects = named_tensors(model), {}, {}
    for name, entry in model.sharded_state_dict(metadata={"singleton_local_shards": False}).items():
        if isinstance(entry, ShardedObject):
            objects[name] = entry
            continue
        # A factory cuts a gated matrix into halves; one process holds both, one after the other.
        first = entry.build()[0] if isinstance(entry, ShardedTensorFactory) else entry
        depth, tensor = first.prepend_axis_num, held[name]
        places[name] = Place(
            first.key,
            tuple(first.global_shape[:depth]),
            tuple(first.global_offset[:depth]),
            tuple(tensor.shape),
            tensor.dtype,
        )
    return ModelPlaces(places, objects)


def write_tensors(
    folder: Path, model: ModelPlaces, tensors: Iterable[tuple[str, int, Tensor]], file_bytes: int
) -> None:
    """Write every parameter into an existing folder, in files of at most file_bytes (or one tensor).

    Args:
        tensors: Name of a parameter, first row of this piece of it, the piece [rows, ...].
    """
    dist_checkpointing.save(
        {"model": dict(model.objects)}, str(folder), SaveInProcess("torch_dist", 1), content_metadata=SHARDING
    )
    metadata_file = folder / ".metadata"
    metadata = pickle.loads(metadata_file.read_bytes())
    with _Files(folder, file_bytes) as files:
        for name, first_row, tensor in tensors:
            place = model.places[name]
            offset = (*place.position, *((first_row, *(0,) * (tensor.ndim - 1)) if tensor.ndim else ()))
            piece = tensor.detach().to(place.dtype).contiguous()
            chunk = piece[(None,) * len(place.stack)]
            described = metadata.state_dict_metadata.setdefault(
                place.key,
                TensorStorageMetadata(
                    TensorProperties(dtype=place.dtype), torch.Size((*place.stack, *place.shape)), chunks=[]
                ),
            )
            described.chunks.append(ChunkStorageMetadata(torch.Size(offset), chunk.shape))
            metadata.storage_data[MetadataIndex(place.key, offset)] = files.add(chunk)
    metadata_file.write_bytes(pickle.dumps(metadata))


class TensorReader:
    """Parameters of a checkpoint of any layout, one at a time. What it raises is among checkpoint.LOAD_ERRORS."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._metadata: Metadata = FileSystemReader(folder).read_metadata()

    def read(self, place: Place) -> Tensor:
        """One parameter, from all pieces that lie in it."""
        described = self._metadata.state_dict_metadata[place.key]
        whole = (*place.stack, *place.shape)
        if not isinstance(described, TensorStorageMetadata) or tuple(described.size) != whole:
            raise ValueError(f"{place.key} has shape {list(getattr(described, 'size', ()))}, wanted {list(whole)}")
        first = (*place.position, *(0 for _ in place.shape))
        sizes = (*(1 for _ in place.stack), *place.shape)
        result: Tensor | None = None
        filled = 0
        for chunk in described.chunks:
            starts = [max(one, other) for one, other in zip(first, chunk.offsets, strict=True)]
            ends = [
                min(a + length, b + other)
                for a, length, b, other in zip(first, sizes, chunk.offsets, chunk.sizes, strict=True)
            ]
            if any(start >= end for start, end in zip(starts, ends, strict=True)):
                continue
            stored = self._load(MetadataIndex(place.key, chunk.offsets))
            if tuple(chunk.sizes) == sizes:
                return stored.reshape(place.shape)
            if result is None:
                result = torch.empty(sizes, dtype=place.dtype)
            taken = stored[_slices(starts, ends, chunk.offsets)]
            result[_slices(starts, ends, first)] = taken
            filled += taken.numel()
        if result is None or filled != result.numel():
            raise ValueError(f"{place.key}: {filled} of {math.prod(place.shape)} values are stored")
        return result.reshape(place.shape)

    def _load(self, index: MetadataIndex) -> Tensor:
        info = self._metadata.storage_data[index]
        with (self._folder / info.relative_path).open("rb") as file:
            view = cast(IO[bytes], _create_file_view(file, info.offset, info.length))
            tensor: Tensor = torch.load(view, map_location="cpu", weights_only=True)
        return tensor


def _slices(starts: Sequence[int], ends: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a - zero, b - zero) for a, b, zero in zip(starts, ends, origin, strict=True))


class _Files:
    """The next file is begun when one is full."""

    def __init__(self, folder: Path, file_bytes: int) -> None:
        self._folder, self._file_bytes = folder, file_bytes
        self._count = 0
        self._file: BinaryIO | None = None

    def __enter__(self) -> "_Files":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, tensor: Tensor) -> _StorageInfo:
        if self._file is None or self._file.tell() + tensor.nbytes > self._file_bytes:
            if self._file is not None:
                self._file.close()
            self._count += 1  # 0 is taken by what is not a tensor
            self._file = (self._folder / f"__{self._count}_0.distcp").open("wb")
        start = self._file.tell()
        # A view of a larger storage would be saved with all of it.
        torch.save(tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor, self._file)
        return _StorageInfo(f"__{self._count}_0.distcp", start, self._file.tell() - start)
