# SPDX-License-Identifier: Apache-2.0
"""The chunks of tensors/ as a table of numbers: the index of a checkpoint, and the list that each rank writes.

Comes after the chunks are written, before torch's index is made from it (torch_index.py) and before any chunk is read
(megatron/tensor_index.py). A checkpoint of 1,024 ranks has 280,000 chunks: as objects they take ten seconds to read, as
columns milliseconds. The file is eight bytes of MAGIC, the length of a JSON header (8 bytes, little-endian), the
header, and one row of little-endian 64-bit integers per chunk: key, file, start, length, crc32, offset and sizes
(one number each per axis). Reading it executes no code. The ranks of a machine read the same pages of its file cache.
"""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

TABLE = "chunks.index"
SUFFIX = ".distcp"  # of files with chunks
MAGIC = b"mindvl-1"
_KEY, _FILE, _START, _LENGTH, _CRC32, _AXES = range(6)  # columns; the offset begins at _AXES


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
class ChunkTable:
    """Chunks of any number of tensors."""

    keys: dict[str, tuple[str, tuple[int, ...]]]  # data type and shape of each tensor
    files: tuple[str, ...]
    rows: NDArray[np.int64]  # [chunks, 5 + 2 * axes]; tensors with fewer axes have offset 0 and size 1 in the others

    @classmethod
    def of(cls, chunks: Iterable[Chunk]) -> "ChunkTable":
        """The table of these chunks, in their order.

        Raises:
            ValueError: Two chunks of a tensor disagree about its shape or data type.
        """
        chunks = list(chunks)
        keys: dict[str, tuple[str, tuple[int, ...]]] = {}
        for chunk in chunks:
            _add(keys, chunk.key, chunk.dtype, tuple(chunk.whole))
        key_of, files = _numbered(keys), tuple(dict.fromkeys(chunk.file for chunk in chunks))
        file_of, axes = _numbered(files), _num_axes(keys)
        rows = [
            [
                *(key_of[chunk.key], file_of[chunk.file], chunk.start, chunk.length, chunk.crc32),
                *(*chunk.offset, *[0] * (axes - len(chunk.offset))),
                *(*chunk.sizes, *[1] * (axes - len(chunk.sizes))),
            ]
            for chunk in chunks
        ]
        return cls(keys, files, np.array(rows, np.int64).reshape(len(rows), _AXES + 2 * axes))

    @classmethod
    def join(cls, tables: Sequence["ChunkTable"]) -> "ChunkTable":
        """All chunks of several tables, in their order.

        Raises:
            ValueError: Two tables disagree about the shape or data type of a tensor.
        """
        keys: dict[str, tuple[str, tuple[int, ...]]] = {}
        for table in tables:
            for key, (dtype, shape) in table.keys.items():
                _add(keys, key, dtype, shape)
        files = tuple(dict.fromkeys(file for table in tables for file in table.files))
        key_of, file_of, axes = _numbered(keys), _numbered(files), _num_axes(keys)
        parts = [np.empty((0, _AXES + 2 * axes), np.int64)]
        for table in tables:
            old, held = table.rows, _num_axes(table.keys)
            rows = np.zeros((len(old), _AXES + 2 * axes), np.int64)
            rows[:, _START:_AXES] = old[:, _START:_AXES]
            rows[:, _KEY] = np.array([key_of[key] for key in table.keys], np.int64)[old[:, _KEY]]
            rows[:, _FILE] = np.array([file_of[file] for file in table.files], np.int64)[old[:, _FILE]]
            rows[:, _AXES : _AXES + held] = old[:, _AXES : _AXES + held]
            rows[:, _AXES + axes :] = 1
            rows[:, _AXES + axes : _AXES + axes + held] = old[:, _AXES + held :]
            parts.append(rows)
        return cls(keys, files, np.concatenate(parts))

    @classmethod
    def read(cls, path: Path) -> "ChunkTable":
        """Read a table written by `write`.

        Raises:
            ValueError: The file is damaged, or a chunk lies outside its tensor.
        """
        table = cls._parse(path)
        table._check(path)
        return table

    @classmethod
    def read_all(cls, paths: Sequence[Path]) -> "ChunkTable":
        """All chunks of the tables in several files, in their order.

        Raises:
            ValueError: As `read` and `join`.
        """
        joined = cls.join([cls._parse(path) for path in paths])
        joined._check(paths[0])
        return joined

    @classmethod
    def _parse(cls, path: Path) -> "ChunkTable":
        content = path.read_bytes()
        try:
            require(content[:8] == MAGIC, f"it does not begin with {MAGIC!r}")
            end = 16 + int.from_bytes(content[8:16], "little")
            header: Any = json.loads(content[16:end])
            keys = {str(key): (str(dtype), tuple(map(int, shape))) for key, dtype, shape in header["keys"]}
            require(len(keys) == len(header["keys"]), "it lists a tensor twice")
            width = _AXES + 2 * _num_axes(keys)
            rows = np.frombuffer(content, "<i8", offset=end).astype(np.int64, copy=False)
            require(
                rows.size == header["chunks"] * width,
                f"it has {rows.size} numbers instead of {header['chunks']} x {width}",
            )
            table = cls(keys, tuple(map(str, header["files"])), rows.reshape(int(header["chunks"]), width))
            for column, known in ((_KEY, len(keys)), (_FILE, len(table.files))):
                numbers = table.rows[:, column]
                require(not len(numbers) or (numbers.min() >= 0 and numbers.max() < known), "a chunk is in no file")
        except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError) as error:
            raise _foreign(path, error) from error
        return table

    def write(self, path: Path) -> None:
        """Write the table atomically."""
        header = {
            "chunks": len(self.rows),
            "files": self.files,
            "keys": [(key, dtype, shape) for key, (dtype, shape) in self.keys.items()],
        }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        unfinished = path.with_name(f"{path.name}.part")
        with unfinished.open("wb") as file:
            file.write(MAGIC + len(text).to_bytes(8, "little") + text)
            file.write(self.rows.astype("<i8", copy=False).tobytes())
        os.replace(unfinished, path)

    def tensor_rows(self) -> dict[str, NDArray[np.int64]]:
        """Indices of the rows of each tensor, in the order of the table."""
        order = np.argsort(self.rows[:, _KEY], kind="stable")
        ends = np.searchsorted(self.rows[order, _KEY], np.arange(len(self.keys) + 1))
        return {key: order[ends[number] : ends[number + 1]] for number, key in enumerate(self.keys)}

    def boxes(self, key: str, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(offsets, sizes) [rows, axes of the tensor] of chunks of one tensor."""
        axes, own = _num_axes(self.keys), len(self.keys[key][1])
        chosen = self.rows[rows]
        return chosen[:, _AXES : _AXES + own], chosen[:, _AXES + axes : _AXES + axes + own]

    def chunk(self, row: int) -> Chunk:
        """One chunk."""
        key, file, start, length, crc32 = self.rows[row, :_AXES].tolist()
        name = list(self.keys)[key]
        dtype, shape = self.keys[name]
        (offset,), (size,) = (numbers.tolist() for numbers in self.boxes(name, np.array([row])))
        return Chunk(name, list(shape), dtype, offset, size, self.files[file], start, length, crc32)

    def _check(self, path: Path) -> None:
        try:
            self._check_files()
            self._check_boxes()
        except (ValueError, OverflowError) as error:
            raise _foreign(path, error) from error

    def _check_files(self) -> None:
        for name in self.files:
            plain = name.endswith(SUFFIX) and "/" not in name
            require(plain, f"{name!r} is not the name of a {SUFFIX} file")
        for key, (_, shape) in self.keys.items():
            require(min(shape, default=0) >= 0, f"{key}: {shape} is not a valid shape")

    def _check_boxes(self) -> None:
        if not len(self.rows):
            return
        axes, rows = _num_axes(self.keys), self.rows
        valid = rows[:, _START:].min() >= 0 and rows[:, _START:].max() < 1 << 62 and rows[:, _CRC32].max() < 1 << 32
        require(valid, "a chunk has an invalid position or checksum")
        shapes = np.array([[*shape, *[1] * (axes - len(shape))] for _, shape in self.keys.values()], np.int64)
        ends = rows[:, _AXES : _AXES + axes] + rows[:, _AXES + axes :]
        outside = (ends > shapes.reshape(len(self.keys), axes)[rows[:, _KEY]]).any(axis=1)
        key = self.chunk(int(outside.argmax())).key
        require(not outside.any(), f"{key}: a chunk ends outside the tensor")


def _foreign(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path.name}: is not the index of a mindvl checkpoint: {error}")


def _add(keys: dict[str, tuple[str, tuple[int, ...]]], key: str, dtype: str, shape: tuple[int, ...]) -> None:
    known = keys.setdefault(key, (dtype, shape))
    require(known == (dtype, shape), f"{key}: is {known} on one rank and {(dtype, shape)} on another")


def _numbered(names: Iterable[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(names)}


def _num_axes(keys: dict[str, tuple[str, tuple[int, ...]]]) -> int:
    return max((len(shape) for _, shape in keys.values()), default=0)


def require(condition: bool, message: str) -> None:
    """Raise ValueError with a message unless the condition holds."""
    if not condition:
        raise ValueError(message)
