# SPDX-License-Identifier: Apache-2.0
"""Transformers model directories, read lazily and written as a stream.

Reading parses only the file headers until a slice of a tensor is requested. Writing knows names, shapes and data types
in advance, so it writes the header first and then one slice after the other; only that slice is in memory. Format:
safetensors (8 bytes header length, JSON header, bytes), with `model.safetensors.index.json` for several files.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from .errors import DirectoryError
from .files import is_plain_name, read_json, regular_file
from .headers import DTYPE_NAMES, METADATA, TensorInfo, read_header

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


class ModelDirectory:
    """The tensors of a directory by name; files stay open until `close`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        weight_map = _weight_map(path)
        self.files = [SINGLE_NAME] if weight_map is None else sorted(set(weight_map.values()))
        self.tensors: dict[str, TensorInfo] = {}
        for file in self.files:
            for info in read_header(regular_file(path, file)):
                if info.name in self.tensors:
                    raise DirectoryError(
                        f"{path / file}: tensor {info.name!r:.200} is also in {self.tensors[info.name].file}. "
                        "Remove one of the files."
                    )
                self.tensors[info.name] = info
        if weight_map is not None:
            _refuse_disagreement(path, weight_map, self.tensors)
        self._open_files: dict[str, Any] = {}

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` along the first axis (a scalar has one row)."""
        info = self.tensors[name]
        row_shape = info.shape[1:]
        row_bytes = math.prod(row_shape) * info.dtype.itemsize
        num_rows = max(0, min(stop, info.shape[0] if info.shape else 1) - start)
        # read, not mapped: the kernel counts mapped pages as memory of the process
        buffer = bytearray(num_rows * row_bytes)
        try:
            file = self._open_files.get(info.file)
            if file is None:
                file = self._open_files[info.file] = open(self.path / info.file, "rb")  # noqa: SIM115  (until close)
            file.seek(info.offset + start * row_bytes)
            num_read = file.readinto(buffer)
        except OSError as error:
            raise DirectoryError(
                f"{self.path / info.file}: tensor {name} cannot be read ({error.strerror}). Copy the file again."
            ) from error
        if num_read != len(buffer):
            raise DirectoryError(
                f"{self.path / info.file}: the file was truncated while tensor {name} was read. Copy it again."
            )
        if not buffer:
            return torch.empty(num_rows, *row_shape, dtype=info.dtype)
        values = torch.frombuffer(buffer, dtype=info.dtype)
        return values.view(num_rows, *row_shape) if info.shape else values.view(())

    def sha256(self) -> dict[str, str]:
        """Hash of each weight file."""
        return {file: _hash_file(self.path / file) for file in self.files}

    def close(self) -> None:
        """Close the open files."""
        for file in self._open_files.values():
            file.close()
        self._open_files.clear()


class DirectoryWriter:
    """Writes tensors in the declared order to files of at most `max_shard_bytes`.

    Example:
        with DirectoryWriter(path, infos, max_shard_bytes=5_000_000_000) as writer:
            for info in infos:
                writer.write(tensor_piece)  # pieces in order, along the first axis
    """

    def __init__(self, path: Path, infos: Iterable[TensorInfo], *, max_shard_bytes: int) -> None:
        self.path = path
        self.sha256: dict[str, str] = {}
        self._shards = _cut_into_shards(list(infos), max_shard_bytes)
        self._names = _shard_names(len(self._shards))
        self._current = -1
        self._left = 0  # bytes still missing in the current file
        self._file: Any = None
        self._hash = hashlib.sha256()

    def write(self, piece: Tensor) -> None:
        """Append the bytes of the next piece."""
        data = piece.contiguous().reshape(-1).view(torch.uint8).numpy().data
        while self._left == 0 and self._current + 1 < len(self._shards):
            self._next_file()
        assert len(data) <= self._left, "a piece crosses the end of a file: tensors were not written as declared"
        self._put(data)
        self._left -= len(data)

    def __enter__(self) -> "DirectoryWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            while self._left == 0 and self._current + 1 < len(self._shards):
                self._next_file()  # files with empty tensors only
            assert self._left == 0, "fewer pieces were written than declared"
            self._close_file()
            if len(self._shards) > 1:
                self._write_index()
        elif self._file is not None:
            self._file.close()

    def _next_file(self) -> None:
        self._close_file()
        self._current += 1
        header: dict[str, Any] = {METADATA: {"format": "pt"}}
        offset = 0
        for info in self._shards[self._current]:
            end = offset + info.num_bytes
            header[info.name] = {
                "dtype": DTYPE_NAMES[info.dtype],
                "shape": list(info.shape),
                "data_offsets": [offset, end],
            }
            offset = end
        self._left = offset
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._file = open(self.path / self._names[self._current], "wb")  # noqa: SIM115  (closed in _close_file)
        self._hash = hashlib.sha256()
        self._put(len(text).to_bytes(8, "little") + text)

    def _put(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._hash.update(data)

    def _close_file(self) -> None:
        if self._file is None:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        self.sha256[self._names[self._current]] = self._hash.hexdigest()

    def _write_index(self) -> None:
        pairs = [(info, name) for shard, name in zip(self._shards, self._names, strict=True) for info in shard]
        index = {
            "metadata": {"total_size": sum(info.num_bytes for info, _ in pairs)},
            "weight_map": {info.name: name for info, name in pairs},
        }
        (self.path / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def weights_sha256(path: Path) -> str:
    """One hash of all weight files of a directory; it covers their names and bytes."""
    hashes = json.dumps(ModelDirectory(path).sha256(), sort_keys=True)
    return hashlib.sha256(hashes.encode()).hexdigest()


def _cut_into_shards(infos: list[TensorInfo], max_shard_bytes: int) -> list[list[TensorInfo]]:
    shards: list[list[TensorInfo]] = [[]]
    size = 0
    for info in infos:
        if shards[-1] and size + info.num_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(info)
        size += info.num_bytes
    return shards


def _shard_names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE_NAME]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _weight_map(path: Path) -> dict[str, str] | None:
    """File name of each tensor from the index; None for a single file without index.

    Raises:
        DirectoryError: There are no weights, two sets of them, or the index names something other than files beside it.
    """
    index = path / INDEX_NAME
    if not path.is_dir():
        raise DirectoryError(f"{path}: the directory does not exist. Give a transformers model directory.")
    if not index.exists():
        if not (path / SINGLE_NAME).exists():
            raise DirectoryError(
                f"{path}: has no {SINGLE_NAME} and no {INDEX_NAME}. Give a transformers model directory."
            )
        return None
    weight_map = read_json(regular_file(path, INDEX_NAME)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise DirectoryError(f"{index}: has no weight_map. Copy the model directory again.")
    for name, file in weight_map.items():
        if not is_plain_name(file):
            raise DirectoryError(
                f"{index}: the file of tensor {name!r:.200} is {file!r:.200}, which is not a plain file name. Check the source "
                "of the model."
            )
    if (path / SINGLE_NAME).exists() and SINGLE_NAME not in weight_map.values():
        raise DirectoryError(
            f"{path / SINGLE_NAME}: the directory also has {INDEX_NAME}, which names other files, so the weights are "
            "ambiguous. Remove one of the two."
        )
    return weight_map


def _refuse_disagreement(path: Path, weight_map: dict[str, str], tensors: dict[str, TensorInfo]) -> None:
    """Index and headers must name the same tensors in the same files."""
    for name, file in weight_map.items():
        if name not in tensors or tensors[name].file != file:
            where = f"is in {tensors[name].file}" if name in tensors else "is in no file"
            raise DirectoryError(
                f"{path / INDEX_NAME}: tensor {name!r:.200} should be in {file} but {where}. Copy the directory again."
            )
    extra = next((info for info in tensors.values() if info.name not in weight_map), None)
    if extra is not None:
        raise DirectoryError(
            f"{path / extra.file}: tensor {extra.name!r:.200} is missing from {INDEX_NAME}. Copy the directory again."
        )


def _hash_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
