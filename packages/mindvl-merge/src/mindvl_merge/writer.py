# SPDX-License-Identifier: Apache-2.0
"""Write a model directory at known offsets, in any order, and continue after an interruption.

Comes after sources.py; run.py writes blocks from several threads. Names, shapes and data types are known in advance, so every
file gets its header and its final size first. A journal beside the files lists the tensors whose values are on disk, so that
an interrupted merge continues with the others.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from .directory import INDEX_NAME, SINGLE_NAME
from .headers import DTYPE_NAMES, METADATA, TensorInfo

JOURNAL_NAME = "journal.jsonl"


class DirectoryWriter:
    """The weight files of a new directory, of at most `max_shard_bytes` each.

    Args:
        path: Existing directory for the files.
        infos: Name, shape and data type of every tensor, in the order in which they are stored.
        inputs: Identifies what is merged and how. A journal for other inputs is discarded with its files.
    """

    def __init__(self, path: Path, infos: Iterable[TensorInfo], *, max_shard_bytes: int, inputs: str) -> None:
        self.path = path
        self.finished: dict[str, dict[str, Any]] = {}  # records of earlier `commit` calls by tensor name
        shards = _cut_into_shards(list(infos), max_shard_bytes)
        self._shards = dict(zip(_shard_names(len(shards)), shards, strict=True))
        self._place: dict[str, tuple[str, int]] = {}  # file and offset of each tensor
        self._descriptors: dict[str, int] = {}
        self._are_sizes_synced = False  # of all files, with their headers
        self._headers = {file: header_bytes(shard) for file, shard in self._shards.items()}
        self._read_journal(inputs)
        self._open_files()

    def write(self, name: str, start: int, values: np.ndarray[Any, Any]) -> None:
        """Store values `[n]` of a tensor, from value `start` of the flattened tensor; safe in several threads."""
        file, offset = self._place[name]
        data = values.view(np.uint8)
        offset, num_written = offset + start * values.itemsize, 0
        while num_written < data.nbytes:
            num_written += os.pwrite(self._descriptors[file], data[num_written:].data, offset + num_written)

    def commit(self, records: dict[str, dict[str, Any]]) -> None:
        """Sync the files of finished tensors, then list them in the journal with a record each."""
        files = {self._place[name][0] for name in records} if self._are_sizes_synced else self._descriptors
        for file in sorted(files):  # not all every time: a large model has hundreds of files
            os.fdatasync(self._descriptors[file])
        self._are_sizes_synced = True
        with open(self.path / JOURNAL_NAME, "a", encoding="utf-8") as journal:
            for name, record in records.items():
                journal.write(json.dumps({"tensor": name, **record}) + "\n")
            journal.flush()
            os.fsync(journal.fileno())
        self.finished |= records

    def finish(self) -> None:
        """Write the index and remove the journal."""
        if len(self._shards) > 1:
            pairs = [(info, file) for file, infos in self._shards.items() for info in infos]
            index = {
                "metadata": {"total_size": sum(info.num_bytes for info, _ in pairs)},
                "weight_map": {info.name: file for info, file in pairs},
            }
            (self.path / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        (self.path / JOURNAL_NAME).unlink()

    def __enter__(self) -> "DirectoryWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def _read_journal(self, inputs: str) -> None:
        path = self.path / JOURNAL_NAME
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
        if lines and _parsed(lines[0]) == {"inputs": inputs} and all(map(self._has_its_size, self._shards)):
            for line in lines[1:]:
                record = _parsed(line)
                if record is None:
                    break  # the process was killed while it wrote this line
                self.finished[record.pop("tensor")] = record
            return
        for file in self._shards:
            (self.path / file).unlink(missing_ok=True)
        path.write_text(json.dumps({"inputs": inputs}) + "\n", encoding="utf-8")

    def _has_its_size(self, file: str) -> bool:
        path = self.path / file
        return path.is_file() and path.stat().st_size == self._num_bytes(file)

    def _num_bytes(self, file: str) -> int:
        return len(self._headers[file]) + sum(info.num_bytes for info in self._shards[file])

    def _open_files(self) -> None:
        for file, infos in self._shards.items():
            offset = len(self._headers[file])
            for info in infos:
                self._place[info.name] = (file, offset)
                offset += info.num_bytes
            descriptor = self._descriptors[file] = os.open(self.path / file, os.O_RDWR | os.O_CREAT, 0o644)
            os.ftruncate(descriptor, self._num_bytes(file))
            os.pwrite(descriptor, self._headers[file], 0)


def has_finished_tensors(path: Path) -> bool:
    """Whether the journal of an unfinished directory lists a tensor."""
    journal = path / JOURNAL_NAME
    return journal.exists() and journal.read_bytes().count(b"\n") > 1


def header_bytes(infos: Iterable[TensorInfo]) -> bytes:
    """Length and header of a safetensors file that stores these tensors one after another."""
    header: dict[str, Any] = {METADATA: {"format": "pt"}}
    offset = 0
    for info in infos:
        end = offset + info.num_bytes
        header[info.name] = {
            "dtype": DTYPE_NAMES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


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
