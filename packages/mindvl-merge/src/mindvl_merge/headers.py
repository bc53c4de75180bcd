# SPDX-License-Identifier: Apache-2.0
"""Read and validate the header of a safetensors file.

Comes after files.py, before directory.py reads values. Format: 8 bytes with the length of the header, the header as JSON,
the values; a header that passes names every byte of the values exactly once (github.com/huggingface/safetensors).
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from .errors import DirectoryError
from .files import parse_json

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
FLOATS = frozenset(DTYPES[name] for name in ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"))
FLOAT8 = frozenset(DTYPES[name] for name in ("F8_E4M3", "F8_E5M2"))
METADATA = "__metadata__"
MAX_HEADER_BYTES = 25_000_000  # about 200,000 tensors in one file
MAX_DIMENSIONS = 32

_MAX_VALUES = 2**62  # values of one tensor, so that sizes in bytes fit 64-bit integers


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """The header entry of one tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    file: str  # name inside the directory
    offset: int  # byte offset of the values in the file

    @property
    def num_values(self) -> int:
        """Number of values; a scalar has one."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Size of the values."""
        return self.num_values * self.dtype.itemsize

    @property
    def is_float(self) -> bool:
        """Whether the values can be merged."""
        return self.dtype in FLOATS


def read_header(path: Path) -> list[TensorInfo]:
    """The tensors of a file in the order of its header.

    Raises:
        DirectoryError: The file cannot be read, or the header is damaged, too large, or does not describe every byte of
            the file exactly once.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            first = file.read(8)
            length = int.from_bytes(first, "little")
            if len(first) < 8 or length > size - 8:
                raise _damaged(path, f"its {size} bytes end before the header does")
            if length > MAX_HEADER_BYTES:
                raise _damaged(path, f"its header has {length} bytes; at most {MAX_HEADER_BYTES} are read")
            content = file.read(length)
    except OSError as error:
        raise DirectoryError(f"{path}: cannot be read ({error.strerror}). Copy the file again.") from error
    header = parse_json(content, path)
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _damaged(path, f"{METADATA} does not hold texts only")
    tensors = [_tensor(path, name, entry, 8 + length) for name, entry in header.items()]
    _refuse_gaps(path, tensors, 8 + length, size)
    return tensors


def _tensor(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    if not name or not name.isprintable():
        raise _damaged(path, f"tensor name {name!r:.80} is empty or not printable")
    where = f"tensor {name:.200}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _damaged(path, f"{where} has {entry!r:.80} in place of dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise DirectoryError(
            f"{path}: {where} has dtype {dtype!r:.40}, which is not supported. "
            f"Give models stored as {', '.join(DTYPES)}."
        )
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS or math.prod(n for n in shape if n) > _MAX_VALUES:
        raise _damaged(path, f"{where} has shape {shape!r:.80}")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise _damaged(path, f"{where} has data_offsets {offsets!r:.80}")
    info = TensorInfo(
        name=name, shape=tuple(shape), dtype=DTYPES[dtype], file=path.name, offset=data_start + offsets[0]
    )
    if offsets[1] - offsets[0] != info.num_bytes:
        raise _damaged(
            path, f"{where} has {offsets[1] - offsets[0]} bytes, but {dtype} {list(shape)} needs {info.num_bytes}"
        )
    return info


def _are_sizes(values: Any) -> bool:
    """Whether this is a list of integers >= 0; True and 1.0 are not integers."""
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _refuse_gaps(path: Path, tensors: Sequence[TensorInfo], start: int, size: int) -> None:
    end, before = start, "the header"
    for info in sorted(tensors, key=lambda one: (one.offset, one.num_bytes)):
        if info.offset != end:
            what = "overlaps" if info.offset < end else f"leaves {info.offset - end} unnamed bytes after"
            raise _damaged(path, f"tensor {info.name:.200} {what} {before:.200}")
        end, before = info.offset + info.num_bytes, info.name
    if end != size:
        raise _damaged(path, f"the file has {size} bytes, but its header describes {end}")


def _damaged(path: Path, what: str) -> DirectoryError:
    return DirectoryError(f"{path}: is not a complete safetensors file: {what}. Copy the file again.")
