# SPDX-License-Identifier: Apache-2.0
"""A transformers directory of safetensors: read tensor by tensor, or only a block of one.

Comes before names.py turns tensors into parameters; stream.py writes such directories. Format: model.safetensors, or shards
with model.safetensors.index.json (Hugging Face). Weights in block-scaled fp8 are given out as bfloat16.
"""

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mindvl_model.errors import WeightError
from mindvl_model.weights import fp8
from mindvl_model.weights.json_file import MAX_JSON_BYTES, parse_json, read_json
from mindvl_model.weights.layout import Block, Rows
from mindvl_model.weights.stream import INDEX, SINGLE, write_weights

__all__ = ["StoredTensor", "WeightDirectory", "as_dtype", "sync_directory", "write_weights"]

MAX_DIMENSIONS = 32  # of a tensor


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies and what its file's header says of it."""

    file: Path
    dtype: str  # as safetensors writes it: F32, BF16, F16, F8_E4M3, I8, ...; BF16 for fp8 with scales
    shape: tuple[int, ...]
    scale: str | None = None  # the tensor with the factors of a weight in fp8


class WeightDirectory:
    """Names and tensors of a directory; headers are read at once, tensors when asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config: dict[str, Any] = read_json(path / "config.json")
        if not isinstance(self.config, dict):
            raise WeightError(f"{path / 'config.json'}: not a JSON object. Fetch the file again.")
        self.model_type = str(self.config.get("model_type"))
        self.bytes_read = 0  # of tensors, as they are stored
        self._fp8_block = self._block_of_fp8()
        self._scales: dict[str, StoredTensor] = {}
        self._stored = self._with_scales(self._read_headers())

    def names(self) -> list[str]:
        """Every tensor of the directory; factors of fp8 weights are part of their weight."""
        return sorted(self._stored)

    def stored(self, name: str) -> StoredTensor:
        """File, type and shape of one tensor, without reading it."""
        if name not in self._stored:
            raise WeightError(f"{self.path}: tensor {name!r} is missing. Take the whole checkpoint it belongs to.")
        return self._stored[name]

    def shape_of(self, name: str, block: Block | Rows | None = None) -> tuple[int, ...]:
        """Shape of a tensor or of a block of it, without reading.

        Raises:
            WeightError: The directory has no such tensor, or it has no such block.
        """
        stored = self.stored(name)
        if block is None:
            return stored.shape
        length = sum(end - start for start, end in _ranges(name, stored, block))
        return (*stored.shape[: block.axis], length, *stored.shape[block.axis + 1 :])

    def read(self, name: str, block: Block | Rows | None = None) -> Tensor:
        """One tensor, or a block of it, on the CPU.

        Raises:
            WeightError: The directory has no such tensor, its file is damaged, or it has no such block.
        """
        stored = self.stored(name)
        if block is None:
            return self._read(name, stored, (slice(None),) * len(stored.shape))
        before = (slice(None),) * block.axis
        pieces = [self._read(name, stored, (*before, slice(start, end))) for start, end in _ranges(name, stored, block)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=block.axis)

    def _read(self, name: str, stored: StoredTensor, place: tuple[slice, ...]) -> Tensor:
        values = self._slice(name, stored.file, place)
        if stored.scale is None:
            return values
        scales = self._slice(stored.scale, self._scales[stored.scale].file, (slice(None), slice(None)))
        rows, columns = (*place, slice(None))[:2]
        return fp8.dequantise(values, scales, self._fp8_block, rows.start or 0, columns.start or 0)

    def _slice(self, name: str, file: Path, place: tuple[slice, ...]) -> Tensor:
        try:
            # Opened anew for each tensor: pages of an open file would count as memory of this process.
            with safe_open(file, framework="pt") as tensors:
                tensor: Tensor = tensors.get_slice(name)[place] if place else tensors.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise WeightError(f"{file}: tensor {name!r} cannot be read ({error}). Fetch the file again.") from error
        self.bytes_read += tensor.nbytes
        return tensor

    def _block_of_fp8(self) -> tuple[int, int]:
        told = self.config.get("quantization_config")
        block = told.get("weight_block_size", fp8.BLOCK) if isinstance(told, dict) else fp8.BLOCK
        if not isinstance(block, list | tuple) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
            raise WeightError(
                f"{self.path / 'config.json'}: weight_block_size={block!r:.60} is not two sizes. Fetch the file again."
            )
        return block[0], block[1]

    def _with_scales(self, found: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
        """The same with each weight in fp8 joined to its factors."""
        joined = dict(found)
        for name, tensor in found.items():
            scale = found.get(name + fp8.SCALE_SUFFIX)
            if tensor.dtype != fp8.STORED_AS or scale is None or len(tensor.shape) != 2:
                continue
            expected = fp8.scale_shape(tensor.shape, self._fp8_block)
            if scale.shape != expected:
                raise WeightError(
                    f"{scale.file}: tensor {name + fp8.SCALE_SUFFIX!r} has shape {list(scale.shape)}, but {name!r} "
                    f"{list(tensor.shape)} in blocks of {self._fp8_block} needs {list(expected)}. Fetch both again."
                )
            self._scales[name + fp8.SCALE_SUFFIX] = joined.pop(name + fp8.SCALE_SUFFIX)
            joined[name] = replace(tensor, dtype="BF16", scale=name + fp8.SCALE_SUFFIX)
        return joined

    def _read_headers(self) -> dict[str, StoredTensor]:
        places = weight_map(self.path)
        if places is None:
            return _header(self.path, SINGLE)
        stored: dict[str, StoredTensor] = {}
        for file in sorted(set(places.values())):
            found = _header(self.path, file)
            for name in sorted(set(found) & set(stored)):
                other = stored[name].file.name
                raise WeightError(
                    f"{self.path / file}: tensor {name!r:.200} is in {other} too, and it is not clear which of them "
                    "counts. Fetch the directory again."
                )
            stored |= found
        for name, file in places.items():
            if name not in stored or stored[name].file.name != file:
                raise WeightError(
                    f"{self.path / INDEX}: tensor {name!r:.200} should lie in {file}, but does not. "
                    "Fetch both files again."
                )
        extra = sorted(set(stored) - set(places))
        if extra:
            raise WeightError(
                f"{stored[extra[0]].file}: tensor {extra[0]!r:.200} is missing from {INDEX}. Fetch both files again."
            )
        return stored


def weight_map(path: Path) -> dict[str, str] | None:
    """File of each tensor as the index says; None where a single file has no index.

    Raises:
        WeightError: There are no weights, two sets of them, or the index names something other than files beside it.
    """
    index = path / INDEX
    if not index.exists():
        if not (path / SINGLE).exists():
            raise WeightError(f"{path}: neither {SINGLE} nor {INDEX} is there. Name a transformers model directory.")
        return None
    document = read_json(index)
    places = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(places, dict) or not places:
        raise WeightError(f"{index}: has no weight_map. Fetch the file again.")
    for name, file in places.items():
        if not _is_plain_name(file):
            raise WeightError(
                f"{index}: tensor {name!r:.200} is said to lie in {file!r:.200}, which is not the name of a file in "
                "this directory. Check where the model is from."
            )
    absent = sorted(file for file in set(places.values()) if not (path / file).exists())
    if absent:
        raise WeightError(f"{index}: names {absent!s:.300}, which are not there. Fetch the missing files.")
    if SINGLE not in places.values() and (path / SINGLE).exists():
        raise WeightError(
            f"{path / SINGLE}: {INDEX} beside it names other files, so it is not clear which weights are meant. "
            "Fetch the directory again."
        )
    return places


def _ranges(name: str, stored: StoredTensor, block: Block | Rows) -> list[tuple[int, int]]:
    try:
        return block.ranges(stored.shape[block.axis])
    except (ValueError, IndexError) as error:
        raise WeightError(
            f"{stored.file}: tensor {name!r} {list(stored.shape)} cannot be spread over tensor-parallel ranks "
            f"({error}). Use another tp_size."
        ) from error


def stored_names(path: Path) -> list[str] | None:
    """Names of the tensors of a directory, of its index alone where it has one; None where it holds no weights.

    Raises:
        WeightError: Index or header is damaged.
    """
    if not (path / INDEX).exists() and not (path / SINGLE).exists():
        return None
    places = weight_map(path)
    return list(_header(path, SINGLE) if places is None else places)


def _is_plain_name(name: object) -> bool:
    """Whether this names a file of the directory itself: no separator, no `..`, nothing that a terminal would obey."""
    is_text = isinstance(name, str) and name.isprintable() and len(name.encode()) <= 255
    return is_text and name not in ("", ".", "..") and not {"/", "\\"} & set(str(name))


def _header(directory: Path, name: str) -> dict[str, StoredTensor]:
    """Types and shapes in a file. That every byte is named once and sizes agree is checked by the library."""
    file = directory / name
    _refuse_escape(directory, file)
    try:
        with open(file, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > MAX_JSON_BYTES:
                raise WeightError(f"{file}: not a whole safetensors file (a header of {length} bytes). Fetch it again.")
            content = stream.read(length)
        with safe_open(file, framework="pt") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 - not a dict
            stored = {name: StoredTensor(file, one.get_dtype(), tuple(one.get_shape())) for name, one in slices.items()}
    except (SafetensorError, OSError) as error:
        reason = ascii(str(error))[1:-1]  # it may hold names from the file, which a terminal would obey
        raise WeightError(f"{file}: not a whole safetensors file ({reason:.300}). Fetch it again.") from error
    parse_json(content, file)  # the library takes the last of two tensors of one name
    for name, one in stored.items():
        fits = len(one.shape) <= MAX_DIMENSIONS and math.prod(size for size in one.shape if size) < 2**62
        if not name.isprintable() or not fits:
            raise WeightError(f"{file}: tensor {name!r:.200} of shape {one.shape!s:.80} cannot be. Fetch it again.")
    return stored


def _refuse_escape(directory: Path, file: Path) -> None:
    """Links inside of the directory are fine, and those into the Hugging Face cache, models--X/blobs/HASH.

    The cache has them from snapshots/COMMIT, and older `huggingface-cli download --local-dir` made them anywhere.
    """
    root, target = directory.resolve(), file.resolve()
    allowed = [root, *([(root.parent.parent / "blobs").resolve()] if root.parent.name == "snapshots" else [])]
    in_cache = target.parent.name == "blobs" and target.parent.parent.name.startswith("models--")
    if not in_cache and not any(target.is_relative_to(place) for place in allowed):
        raise WeightError(f"{file}: the symbolic link leaves the directory, to {target}. Replace it with a copy.")
    if not file.is_file():
        raise WeightError(f"{file}: not a regular file. Fetch the directory again.")


def sync_directory(directory: Path) -> None:
    """Force every file of a directory to the disk, before it is renamed into place."""
    for path in [*directory.iterdir(), directory]:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def as_dtype(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The tensor in another floating type; None keeps its own."""
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)
