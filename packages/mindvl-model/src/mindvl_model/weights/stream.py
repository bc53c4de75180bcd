# SPDX-License-Identifier: Apache-2.0
"""Write safetensors files one tensor at a time, in shards of a limited size, with an index.

The last step of an export. Only one tensor is in memory: space for the header, which precedes the data, is reserved
and padded with spaces, as the format allows (github.com/huggingface/safetensors, README, "Format").
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
HEADER_BYTES = 1 << 18  # reserved per file, enough for about 2,000 tensors; a fuller header starts the next file

_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
}


def write_weights(directory: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int = 4 << 30) -> None:
    """Write named tensors as safetensors to an existing directory, in shards of at most `shard_bytes` bytes.

    A larger tensor gets its own shard. The caller renames the directory into place.
    """
    names: list[list[str]] = []
    total_bytes = 0
    shard: _Shard | None = None
    for name, tensor in tensors:
        data = tensor.detach().cpu().contiguous()
        if shard is not None and not shard.takes(name, data, shard_bytes):
            names.append(shard.close())
            shard = None
        if shard is None:
            shard = _Shard(directory / f"shard-{len(names)}.tmp")
        shard.add(name, data)
        total_bytes += data.nbytes
    names.append((shard or _Shard(directory / f"shard-{len(names)}.tmp")).close())
    _name_files(directory, names, total_bytes)


class _Shard:
    """A safetensors file that is being written."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("wb")
        self._file.seek(HEADER_BYTES)
        self._header: dict[str, Any] = {}
        self._header_bytes = 100  # metadata and braces
        self._bytes = 0

    def takes(self, name: str, tensor: Tensor, shard_bytes: int) -> bool:
        """Whether the tensor fits into data and header, at an offset aligned to its data type."""
        fits = self._bytes + tensor.nbytes <= shard_bytes
        return fits and self._header_bytes + _entry_bytes(name) < HEADER_BYTES and not self._bytes % tensor.itemsize

    def add(self, name: str, tensor: Tensor) -> None:
        offsets = [self._bytes, self._bytes + tensor.nbytes]
        self._header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        self._header_bytes += _entry_bytes(name)
        if tensor.numel():
            self._file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
        self._bytes = offsets[1]

    def close(self) -> list[str]:
        """Write the header and return the names of the tensors in the file."""
        text = json.dumps({"__metadata__": {"format": "pt"}, **self._header}, separators=(",", ":")).encode()
        assert len(text) <= HEADER_BYTES - 8
        self._file.truncate(max(HEADER_BYTES, self._file.tell()))
        self._file.seek(0)
        self._file.write((HEADER_BYTES - 8).to_bytes(8, "little") + text.ljust(HEADER_BYTES - 8))
        self._file.close()
        return list(self._header)


def _entry_bytes(name: str) -> int:
    return 6 * len(name) + 160  # upper bound: the name with JSON escapes, data type, shape and two offsets


def _name_files(directory: Path, names: list[list[str]], total_bytes: int) -> None:
    weight_map: dict[str, str] = {}
    for number, held in enumerate(names):
        file = SINGLE if len(names) == 1 else f"model-{number + 1:05d}-of-{len(names):05d}.safetensors"
        (directory / f"shard-{number}.tmp").rename(directory / file)
        weight_map.update(dict.fromkeys(held, file))
    if len(names) > 1:
        text = json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": weight_map}, indent=2, sort_keys=True)
        (directory / INDEX).write_text(text + "\n")
