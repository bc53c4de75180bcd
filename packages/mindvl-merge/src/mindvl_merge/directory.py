# SPDX-License-Identifier: Apache-2.0
"""Transformers model directories, read lazily: only headers are parsed until values are requested.

Comes after headers.py; writer.py writes the same format: safetensors (8 bytes header length, JSON header, bytes), with
`model.safetensors.index.json` for several files.
"""

import errno
import os
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from .errors import DirectoryError
from .files import is_plain_name, read_json, regular_file
from .headers import TensorInfo, read_header

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


class ModelDirectory:
    """The tensors of a directory by name; files stay open until `close`. Reading is safe in several threads.

    Args:
        path: The directory.
        file: Name of the only weight file, if it is not that of a model.
    """

    def __init__(self, path: Path, file: str | None = None) -> None:
        self.path = path
        weight_map = None if file else _weight_map(path)
        self.files = [file or SINGLE_NAME] if weight_map is None else sorted(set(weight_map.values()))
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
        self._descriptors: dict[str, int] = {}

    def open_files(self) -> None:
        """Open all weight files; before several threads read."""
        for file in self.files:
            self._descriptor(file)

    def read(self, name: str, start: int, stop: int, into: np.ndarray[Any, Any] | None = None) -> np.ndarray[Any, Any]:
        """Values `start` to `stop` of the flattened tensor.

        Args:
            into: Bytes to read into, `[at least (stop - start) * itemsize]` uint8; new memory if None.

        Returns:
            Array `[stop - start]` of the stored data type.

        Raises:
            DirectoryError: The file cannot be read, or became shorter since its header was read.
        """
        info = self.tensors[name]
        num_bytes = (stop - start) * info.dtype.itemsize
        buffer = np.empty(num_bytes, np.uint8) if into is None else into[:num_bytes]
        offset, num_read = info.offset + start * info.dtype.itemsize, 0
        try:
            while num_read < num_bytes:  # one call reads at most 2 GB
                count = os.preadv(self._descriptor(info.file), [buffer[num_read:].data], offset + num_read)
                if count == 0:
                    raise DirectoryError(
                        f"{self.path / info.file}: the file was truncated while tensor {name} was read. Copy it again."
                    )
                num_read += count
        except OSError as error:
            raise DirectoryError(
                f"{self.path / info.file}: tensor {name} cannot be read ({error.strerror}). Copy the file again."
            ) from error
        return buffer.view(info.dtype)

    def is_hole(self, name: str, start: int, stop: int) -> bool:
        """Whether the values lie in a hole of a sparse file, where every byte is zero."""
        info = self.tensors[name]
        first = info.offset + start * info.dtype.itemsize
        try:
            return (
                os.lseek(self._descriptor(info.file), first, os.SEEK_DATA) >= info.offset + stop * info.dtype.itemsize
            )
        except OSError as error:
            return error.errno == errno.ENXIO  # no data up to the end of the file; EINVAL: holes are not supported

    def allocated_bytes(self, file: str) -> int:
        """Bytes that a weight file occupies on disk; fewer than its size if it is sparse."""
        return os.fstat(self._descriptor(file)).st_blocks * 512

    def close(self) -> None:
        """Close the open files."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def __enter__(self) -> "ModelDirectory":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _descriptor(self, file: str) -> int:
        if file not in self._descriptors:
            self._descriptors[file] = os.open(self.path / file, os.O_RDONLY)
        return self._descriptors[file]


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
