# SPDX-License-Identifier: Apache-2.0
"""Merge model directories: check all of them, then stream one tensor after the other into a new directory.

Memory: slices of at most `_PIECE_ELEMENTS` values, independent of the size of model or tensor. The result is written beside
the output under a hidden name, synced, and renamed (publish.py), so that a killed process leaves the output unchanged.
"""

import errno
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .config import MergeConfig
from .directory import DirectoryWriter, ModelDirectory
from .errors import DirectoryError, MergeError
from .files import other_files, read_json, real_path
from .headers import TensorInfo
from .methods import METHODS
from .output_tensors import MANIFEST_NAME, OutputTensor, check_paths, output_tensors
from .parents import check_parents
from .publish import partial_directory, recover, replace_directory

logger = logging.getLogger(__name__)

MANIFEST_FORMAT = 1

_PIECE_ELEMENTS = 2**18  # 2 MiB in float64: the sum stays in the cache of a core
_NOT_OF_THE_MODEL = (".git", ".cache", "__pycache__")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")

Progress = Callable[[int, int], None]  # bytes done, total bytes


def merge(config: MergeConfig, *, progress: Progress | None = None) -> dict[str, Any]:
    """Carry out a merge.

    Args:
        progress: Called after every slice with written and total bytes.

    Returns:
        The manifest, also written to `merge.json` in the new directory.

    Raises:
        MergeError: The models are incompatible, have values that are not finite or integer tensors that differ; the
            output overlaps an input; the disk is full.
    """
    try:
        return _merge(config, progress or (lambda done, total: None))
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        to_do = "Free space or choose another output." if full else "Check the disk and the permissions."
        raise MergeError(
            f"{error.filename or config.out}: cannot be read or written ({error.strerror or error}), and nothing was "
            f"changed. {to_do}"
        ) from error


def _merge(config: MergeConfig, progress: Progress) -> dict[str, Any]:
    out = real_path(config.out)  # through a symbolic link to the directory itself
    recover(out)
    check_paths(config)
    directories = [ModelDirectory(path) for path in config.models]
    try:
        warnings = check_parents(config, directories)
        outputs = output_tensors(config, directories[0])
        with partial_directory(out) as partial:
            _copy_other_files(directories[0], partial, config)
            file_hashes = _write_tensors(config, directories, outputs, partial, progress)
            manifest = _manifest(config, directories, outputs, file_hashes) | {"warnings": warnings}
            (partial / MANIFEST_NAME).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
            replace_directory(partial, out)
    finally:
        for directory in directories:
            directory.close()
    for warning in warnings:
        logger.warning("%s", warning)
    logger.info("merged %d models into %s", len(directories), config.out)
    return manifest


def _write_tensors(
    config: MergeConfig,
    directories: Sequence[ModelDirectory],
    outputs: Sequence[OutputTensor],
    path: Path,
    progress: Progress,
) -> dict[str, str]:
    total = sum(tensor.info.num_bytes for tensor in outputs)
    done = 0
    writer = DirectoryWriter(path, (tensor.info for tensor in outputs), max_shard_bytes=config.max_shard_bytes)
    with writer:
        for tensor in outputs:
            for start, stop in _row_ranges(tensor.info):
                piece = _make_piece(config, directories, tensor, start, stop)
                writer.write(piece)
                done += piece.numel() * piece.element_size()
                progress(done, total)
    return writer.sha256


def _make_piece(
    config: MergeConfig, directories: Sequence[ModelDirectory], tensor: OutputTensor, start: int, stop: int
) -> Tensor:
    name, dtype = tensor.info.name, tensor.info.dtype
    if tensor.is_merged:
        pieces = (directory.read_rows(name, start, stop) for directory in directories)
        merged = METHODS[config.method](pieces, config.model_weights).to(dtype)
        _refuse_non_finite(merged, directories, tensor, start, stop)
        return merged
    piece = directories[0].read_rows(name, start, stop)
    if not dtype.is_floating_point:
        for other in directories[1:]:
            if not torch.equal(piece, other.read_rows(name, start, stop)):
                raise MergeError(
                    f"{other.path / other.tensors[name].file}: integer tensor {name} differs from that in "
                    f"{directories[0].path} and cannot be averaged. Merge models with equal integer tensors."
                )
    copied = piece.to(dtype)
    _refuse_non_finite(copied, directories[:1], tensor, start, stop)
    return copied


def _refuse_non_finite(
    result: Tensor, directories: Sequence[ModelDirectory], tensor: OutputTensor, start: int, stop: int
) -> None:
    """Check the result only: NaN or infinity of any parent is in it too, whatever the weight of the parent."""
    name = tensor.info.name
    if not result.dtype.is_floating_point or bool(result.isfinite().all()):
        return
    for directory in directories:
        piece = directory.read_rows(name, start, stop)
        count = int(piece.isfinite().logical_not().sum())
        if count:
            raise DirectoryError(
                f"{directory.path / directory.tensors[name].file}: tensor {name} has NaN or infinity ({count} values in "
                f"rows {start} to {stop - 1}). Train or copy this model again, or remove it from the merge."
            )
    raise MergeError(
        f"{directories[0].path / directories[0].tensors[name].file}: tensor {name} has values outside the range of "
        f"{str(tensor.info.dtype).removeprefix('torch.')}. Choose another data type (--dtype) or weights that sum to 1."
    )


def _row_ranges(info: TensorInfo) -> Iterator[tuple[int, int]]:
    if not info.shape:
        yield 0, 1
        return
    if not prod(info.shape):
        return
    rows = max(1, _PIECE_ELEMENTS // prod(info.shape[1:]))
    for start in range(0, info.shape[0], rows):
        yield start, min(start + rows, info.shape[0])


def _copy_other_files(first: ModelDirectory, path: Path, config: MergeConfig) -> None:
    def is_ignored(file: Path) -> bool:
        at_top = len(file.parts) == 1
        return (
            file.name.endswith((*_WEIGHT_SUFFIXES, ".index.json"))
            or file.name in _NOT_OF_THE_MODEL
            or (at_top and file.name == MANIFEST_NAME)
        )

    for file in other_files(first.path, is_ignored):
        (path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(first.path / file, path / file)
    config_path = path / "config.json"
    if config.torch_dtype is not None and config_path.is_file():
        document = _with_dtype(read_json(config_path), config.torch_dtype)
        config_path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _with_dtype(document: Any, dtype: str) -> Any:
    if not isinstance(document, dict):
        return document
    return {
        key: dtype if key in ("dtype", "torch_dtype") and isinstance(value, str) else _with_dtype(value, dtype)
        for key, value in document.items()
    }


def _manifest(
    config: MergeConfig,
    directories: Sequence[ModelDirectory],
    outputs: Sequence[OutputTensor],
    file_hashes: dict[str, str],
) -> dict[str, Any]:
    return {
        "format": MANIFEST_FORMAT,
        "method": config.method,
        "models": [
            {"path": str(directory.path), "weight": weight, "sha256": directory.sha256()}
            for directory, weight in zip(directories, config.model_weights, strict=True)
        ],
        "only": list(config.only),
        "allow_different": list(config.allow_different),
        "dtype": config.torch_dtype,
        "num_merged": sum(tensor.is_merged for tensor in outputs),
        "num_copied": sum(not tensor.is_merged for tensor in outputs),
        "sha256": file_hashes,
    }
