# SPDX-License-Identifier: Apache-2.0
"""Model folders in the transformers layout, read lazily and written as a stream.

Reading looks at file headers only until a piece of a tensor is asked for. Writing knows names, shapes and types
beforehand, so it writes the header first and then the bytes of one piece after the other; nothing but that piece is
in memory. Format: safetensors (8 bytes header length, JSON header, bytes), with `model.safetensors.index.json` when
there are several files.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from .errors import FolderError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """What a header says of one tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: str  # name inside the folder
    offset: int  # where its bytes begin in the file

    @property
    def num_bytes(self) -> int:
        """Size of the values."""
        return math.prod(self.shape) * self.dtype.itemsize


class ModelFolder:
    """The tensors of a folder by name; open files are kept until `close`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = _weight_files(path)
        self.tensors: dict[str, TensorInfo] = {}
        for file in self.files:
            for info in _read_header(path / file):
                if info.name in self.tensors:
                    raise FolderError(
                        f"tensor {info.name} is in two files. {path}: {self.tensors[info.name].file}, "
                        f"{file}. Remove one."
                    )
                self.tensors[info.name] = info
        self._open_files: dict[str, Any] = {}

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` along the first axis (a scalar has one row)."""
        info = self.tensors[name]
        file = self._open_files.get(info.file)
        if file is None:
            file = self._open_files[info.file] = open(self.path / info.file, "rb")  # noqa: SIM115  (kept until close)
        row_shape = info.shape[1:]
        row_bytes = math.prod(row_shape) * info.dtype.itemsize
        num_rows = max(0, min(stop, info.shape[0] if info.shape else 1) - start)
        # read, not mapped: pages of mapped files count as memory of the process until the machine runs short
        buffer = bytearray(num_rows * row_bytes)
        file.seek(info.offset + start * row_bytes)
        if file.readinto(buffer) != len(buffer):
            raise FolderError(
                f"the file became shorter while it was read. {self.path / info.file}: {name}. Copy it again."
            )
        if not buffer:
            return torch.empty(num_rows, *row_shape, dtype=info.dtype)
        values = torch.frombuffer(buffer, dtype=info.dtype)
        return values.view(num_rows, *row_shape) if info.shape else values.view(())

    def sha256(self) -> dict[str, str]:
        """Hash of each weight file."""
        return {file: _hash_file(self.path / file) for file in self.files}

    def close(self) -> None:
        """Let go of the open files."""
        for file in self._open_files.values():
            file.close()
        self._open_files.clear()


class FolderWriter:
    """Writes tensors in the order announced, cut into files of at most `max_shard_bytes`.

    Example:
        with FolderWriter(path, infos, max_shard_bytes=5_000_000_000) as writer:
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
        assert len(data) <= self._left, "a piece crosses the end of a file: tensors were not written as announced"
        self._put(data)
        self._left -= len(data)

    def __enter__(self) -> "FolderWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            while self._left == 0 and self._current + 1 < len(self._shards):
                self._next_file()  # files that hold empty tensors only
            assert self._left == 0, "fewer pieces were written than announced"
            self._close_file()
            if len(self._shards) > 1:
                self._write_index()
        elif self._file is not None:
            self._file.close()

    def _next_file(self) -> None:
        self._close_file()
        self._current += 1
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for info in self._shards[self._current]:
            end = offset + info.num_bytes
            header[info.name] = {
                "dtype": _DTYPE_NAMES[info.dtype],
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
    """One hash of all weight files of a folder: equal exactly if names and bytes of the files are."""
    hashes = json.dumps(ModelFolder(path).sha256(), sort_keys=True)
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


def _weight_files(path: Path) -> list[str]:
    index = path / INDEX_NAME
    if index.is_file():
        try:
            weight_map: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError) as error:
            raise FolderError(f"no weight_map can be read. {index}. Copy the folder again.") from error
        return sorted(set(weight_map.values()))
    if (path / SINGLE_NAME).is_file():
        return [SINGLE_NAME]
    raise FolderError(f"no {SINGLE_NAME} and no {INDEX_NAME}. {path}. Give a model folder in the transformers layout.")


def _read_header(path: Path) -> Iterator[TensorInfo]:
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = path.stat().st_size
            if length > size:
                raise ValueError("the header is longer than the file")
            header = json.loads(file.read(length))
        end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        if 8 + length + end != size:
            raise ValueError(f"{size} bytes instead of {8 + length + end}")
    except FileNotFoundError as error:
        raise FolderError(f"a file that the index names is missing. {path}. Copy the folder again.") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FolderError(f"this is no whole safetensors file ({error}). {path}. Copy it again.") from error
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in DTYPES:
            raise FolderError(f"type {entry['dtype']} is not known. {path}: {name}. Use one of {', '.join(DTYPES)}.")
        yield TensorInfo(
            name=name,
            shape=tuple(entry["shape"]),
            dtype=DTYPES[entry["dtype"]],
            file=path.name,
            offset=8 + length + entry["data_offsets"][0],
        )


def _hash_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
