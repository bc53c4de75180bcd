# SPDX-License-Identifier: Apache-2.0
"""Read tensors, or blocks of tensors, from a transformers directory of safetensors files.

names.py maps the tensors to parameters; stream.py writes such directories. Format: model.safetensors, or shards with
model.safetensors.index.json (Hugging Face). Weights in block-scaled fp8 are dequantized to bfloat16.
"""

import errno
import fcntl
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mindvl_model.errors import WeightError
from mindvl_model.weights import fp8
from mindvl_model.weights.json_file import MAX_JSON_BYTES, parse_json, read_json
from mindvl_model.weights.sharding import Block, Rows
from mindvl_model.weights.stream import INDEX, SINGLE, write_weights

__all__ = ["StoredTensor", "WeightDirectory", "as_dtype", "new_directory", "write_weights"]

MAX_DIMENSIONS = 32  # per tensor
_LOCKS_NOT_SUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


@dataclass(frozen=True)
class StoredTensor:
    """File, data type and shape of a tensor, from the header of the file."""

    file: Path
    dtype: str  # of safetensors: F32, BF16, F16, F8_E4M3, I8, ...; BF16 for fp8 with scales
    shape: tuple[int, ...]
    scale: str | None = None  # name of the tensor with the scales of an fp8 weight


class WeightDirectory:
    """The tensors of a directory. Headers are read at construction, tensors on request.

    Raises:
        WeightError: config.json, the index or a header is missing, damaged or inconsistent.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config: dict[str, Any] = read_json(path / "config.json")
        if not isinstance(self.config, dict):
            raise WeightError(f"{path / 'config.json'}: must be a JSON object. Download the file again.")
        self.model_type = str(self.config.get("model_type"))
        self.bytes_read = 0  # of tensor data, as stored
        self._fp8_block = self._block_of_fp8()
        self._scales: dict[str, StoredTensor] = {}
        self._stored = self._with_scales(self._read_headers())

    def names(self) -> list[str]:
        """Names of all tensors, sorted. The scales of an fp8 weight are not listed separately."""
        return sorted(self._stored)

    def stored(self, name: str) -> StoredTensor:
        """File, data type and shape of a tensor, without reading its data.

        Raises:
            WeightError: The directory has no such tensor.
        """
        if name not in self._stored:
            raise WeightError(f"{self.path}: tensor {name!r} is missing. Download the whole model.")
        return self._stored[name]

    def shape_of(self, name: str, block: Block | Rows | None = None) -> tuple[int, ...]:
        """Shape of a tensor or of a block of it, without reading its data.

        Raises:
            WeightError: The directory has no such tensor, or the tensor cannot be split this way.
        """
        stored = self.stored(name)
        if block is None:
            return stored.shape
        length = sum(end - start for start, end in _ranges(name, stored, block))
        return (*stored.shape[: block.axis], length, *stored.shape[block.axis + 1 :])

    def read(self, name: str, block: Block | Rows | None = None) -> Tensor:
        """Read a tensor, or a block of it, to the CPU.

        Raises:
            WeightError: The directory has no such tensor, its file is damaged, or it cannot be split this way.
        """
        stored = self.stored(name)
        if block is None:
            return self._read(name, stored, (slice(None),) * len(stored.shape))
        before = (slice(None),) * block.axis
        pieces = [self._read(name, stored, (*before, slice(start, end))) for start, end in _ranges(name, stored, block)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=block.axis)

    def _read(self, name: str, stored: StoredTensor, index: tuple[slice, ...]) -> Tensor:
        values = self._slice(name, stored.file, index)
        if stored.scale is None:
            return values
        scales = self._slice(stored.scale, self._scales[stored.scale].file, (slice(None), slice(None)))
        rows, columns = (*index, slice(None))[:2]
        return fp8.dequantize(values, scales, self._fp8_block, rows.start or 0, columns.start or 0)

    def _slice(self, name: str, file: Path, index: tuple[slice, ...]) -> Tensor:
        try:
            # Open the file for each tensor: the mapped pages of an open file count as memory of this process.
            with safe_open(file, framework="pt") as tensors:
                tensor: Tensor = tensors.get_slice(name)[index] if index else tensors.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise WeightError(f"{file}: tensor {name!r} cannot be read ({error}). Download the file again.") from error
        self.bytes_read += tensor.nbytes
        return tensor

    def _block_of_fp8(self) -> tuple[int, int]:
        settings = self.config.get("quantization_config")
        block = settings.get("weight_block_size", fp8.BLOCK) if isinstance(settings, dict) else fp8.BLOCK
        if not isinstance(block, list | tuple) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
            raise WeightError(
                f"{self.path / 'config.json'}: weight_block_size must be two positive integers, got {block!r:.60}. "
                "Download the file again."
            )
        return block[0], block[1]

    def _with_scales(self, found: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
        """Assign each fp8 weight the tensor with its scales."""
        joined = dict(found)
        for name, tensor in found.items():
            scale = found.get(name + fp8.SCALE_SUFFIX)
            if tensor.dtype != fp8.STORED_AS or scale is None or len(tensor.shape) != 2:
                continue
            expected = fp8.scale_shape(tensor.shape, self._fp8_block)
            if scale.shape != expected:
                raise WeightError(
                    f"{scale.file}: tensor {name + fp8.SCALE_SUFFIX!r} has shape {list(scale.shape)}, but {name!r} "
                    f"{list(tensor.shape)} with blocks {self._fp8_block} needs {list(expected)}. Download both files "
                    "again."
                )
            self._scales[name + fp8.SCALE_SUFFIX] = joined.pop(name + fp8.SCALE_SUFFIX)
            joined[name] = replace(tensor, dtype="BF16", scale=name + fp8.SCALE_SUFFIX)
        return joined

    def _read_headers(self) -> dict[str, StoredTensor]:
        files = weight_map(self.path)
        if files is None:
            return _header(self.path, SINGLE)
        stored: dict[str, StoredTensor] = {}
        for file in sorted(set(files.values())):
            found = _header(self.path, file)
            for name in sorted(set(found) & set(stored)):
                other = stored[name].file.name
                raise WeightError(
                    f"{self.path / file}: tensor {name!r:.200} is also in {other}, so its value is ambiguous. "
                    "Download the directory again."
                )
            stored |= found
        for name, file in files.items():
            if name not in stored or stored[name].file.name != file:
                raise WeightError(
                    f"{self.path / INDEX}: tensor {name!r:.200} is assigned to {file}, which does not contain it. "
                    "Download both files again."
                )
        extra = sorted(set(stored) - set(files))
        if extra:
            raise WeightError(
                f"{stored[extra[0]].file}: tensor {extra[0]!r:.200} is missing from {INDEX}. Download both files again."
            )
        return stored


def weight_map(path: Path) -> dict[str, str] | None:
    """Read the file name of each tensor from the index; None for a single file without an index.

    Raises:
        WeightError: There are no weights, there are two sets of weights, or the index is damaged.
    """
    index = path / INDEX
    if not index.exists():
        if not (path / SINGLE).exists():
            raise WeightError(f"{path}: contains neither {SINGLE} nor {INDEX}. Use a transformers model directory.")
        return None
    document = read_json(index)
    files = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(files, dict) or not files:
        raise WeightError(f"{index}: weight_map is missing. Download the file again.")
    for name, file in files.items():
        if not _is_plain_name(file):
            raise WeightError(
                f"{index}: tensor {name!r:.200} is assigned to {file!r:.200}, which is not the name of a file in this "
                "directory. Check the source of the model."
            )
    absent = sorted(file for file in set(files.values()) if not (path / file).exists())
    if absent:
        raise WeightError(f"{index}: files {absent!s:.300} are missing. Download them.")
    if SINGLE not in files.values() and (path / SINGLE).exists():
        raise WeightError(
            f"{path / SINGLE}: not listed in {INDEX}, so the directory contains two sets of weights. Download the "
            "directory again."
        )
    return files


def _ranges(name: str, stored: StoredTensor, block: Block | Rows) -> list[tuple[int, int]]:
    try:
        return block.ranges(stored.shape[block.axis])
    except (ValueError, IndexError) as error:
        raise WeightError(
            f"{stored.file}: tensor {name!r} {list(stored.shape)} cannot be split over tensor-parallel ranks "
            f"({str(error).rstrip('.')}). Use another tp_size."
        ) from error


def stored_names(path: Path) -> list[str] | None:
    """Names of the tensors in the index or the single file of a directory; None if there are no weights.

    Raises:
        WeightError: The index or the header is damaged.
    """
    if not (path / INDEX).exists() and not (path / SINGLE).exists():
        return None
    files = weight_map(path)
    return list(_header(path, SINGLE) if files is None else files)


def _is_plain_name(name: object) -> bool:
    """Whether this is the name of a file in the directory: no separator, no `..`, no control character."""
    is_text = isinstance(name, str) and name.isprintable() and len(name.encode()) <= 255
    return is_text and name not in ("", ".", "..") and not {"/", "\\"} & set(str(name))


def _header(directory: Path, name: str) -> dict[str, StoredTensor]:
    """Read the header of a file. safetensors checks that the tensors cover the data exactly."""
    file = directory / name
    _check_inside(directory, file)
    try:
        with open(file, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > MAX_JSON_BYTES:
                raise WeightError(
                    f"{file}: not a complete safetensors file (header of {length} bytes). Download it again."
                )
            content = stream.read(length)
        with safe_open(file, framework="pt") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 - not a dict
            stored = {name: StoredTensor(file, one.get_dtype(), tuple(one.get_shape())) for name, one in slices.items()}
    except (SafetensorError, OSError) as error:
        reason = ascii(str(error))[1:-1]  # names in the file may contain terminal control characters
        raise WeightError(f"{file}: not a complete safetensors file ({reason:.300}). Download it again.") from error
    parse_json(content, file)  # rejects duplicate names, of which safetensors uses the last
    for name, one in stored.items():
        is_valid = len(one.shape) <= MAX_DIMENSIONS and math.prod(size for size in one.shape if size) < 2**62
        if not name.isprintable() or not is_valid:
            raise WeightError(
                f"{file}: tensor {name!r:.200} of shape {one.shape!s:.80} has an invalid name or shape. Download the "
                "file again."
            )
    return stored


def _check_inside(directory: Path, file: Path) -> None:
    """Accept links inside the directory and into the Hugging Face cache (models--X/blobs/HASH), and no other links.

    The cache links to blobs from snapshots/COMMIT; older `huggingface-cli download --local-dir` does from anywhere.
    """
    root, target = directory.resolve(), file.resolve()
    allowed = [root, *([(root.parent.parent / "blobs").resolve()] if root.parent.name == "snapshots" else [])]
    in_cache = target.parent.name == "blobs" and target.parent.parent.name.startswith("models--")
    if not in_cache and not any(target.is_relative_to(path) for path in allowed):
        raise WeightError(
            f"{file}: the symbolic link points outside the directory, to {target}. Replace it with a copy of the file."
        )
    if not file.is_file():
        raise WeightError(f"{file}: not a regular file. Download the directory again.")


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """A directory to fill under a temporary name; at the end of the block it is flushed to disk and becomes `out`.

    Raises:
        WeightError: It cannot be written, or another process writes it.
    """
    unfinished = out.with_name(f"{out.name}.unfinished")
    lock = None
    try:
        lock = _lock(unfinished, out)
        _clear(unfinished)  # of a killed process
        yield unfinished
        for path in [*unfinished.iterdir(), unfinished]:
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)
        os.replace(unfinished, out)
    except Exception as error:
        # The tokenizer is saved by a library in Rust, which reports a full disk as "Exception: ... (os error 28)".
        if not isinstance(error, OSError) and "(os error " not in str(error):
            raise
        what = getattr(error, "strerror", None) or str(error)[:300]
        raise WeightError(
            f"{out}: cannot be written ({what}). Free disk space, or choose another directory."
        ) from error
    finally:
        if lock is not None:
            if _is_open_as(lock, unfinished):
                shutil.rmtree(unfinished, ignore_errors=True)
            os.close(lock)


def _lock(unfinished: Path, out: Path) -> int:
    """Create the directory and lock it, so that two processes do not fill it at the same time; returns its descriptor."""
    unfinished.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(unfinished, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_ours = _is_open_as(descriptor, unfinished)
    except BlockingIOError:
        is_ours = False
    except OSError as error:
        is_ours = error.errno in _LOCKS_NOT_SUPPORTED  # a network file system without locks
    if is_ours:
        return descriptor
    os.close(descriptor)
    raise WeightError(f"{out}: another process is writing it. Wait for that process, or choose another directory.")


def _is_open_as(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _clear(directory: Path) -> None:
    for left in directory.iterdir():
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left)
        else:
            left.unlink()


def as_dtype(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Convert a floating-point tensor; with None, or for another kind of tensor, return it unchanged."""
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)
