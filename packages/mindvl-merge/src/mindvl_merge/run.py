# SPDX-License-Identifier: Apache-2.0
"""Merge model folders: check all, then stream tensor after tensor into a new folder that appears only when it is whole.

Memory: pieces of at most `_PIECE_ELEMENTS` values, whatever the size of model or tensor. The result is written beside
the output under a hidden name, synced, and renamed, so that a killed run leaves the output as it was.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .config import MergeConfig
from .errors import MergeError
from .folder import INDEX_NAME, FolderWriter, ModelFolder, TensorInfo
from .methods import METHODS
from .plan import TensorPlan, check_paths, make_plan

logger = logging.getLogger(__name__)

MANIFEST_NAME = "merge.json"
MANIFEST_FORMAT = 1

_PIECE_ELEMENTS = 2**18  # 2 MiB in float64: the sum stays in the cache of a core
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")

Progress = Callable[[int, int], None]  # bytes done, bytes in all


def merge(config: MergeConfig, *, progress: Progress | None = None) -> dict[str, Any]:
    """Carry out a merge.

    Args:
        progress: Called after every piece with bytes written so far and in all.

    Returns:
        The manifest, also written to `merge.json` in the new folder.

    Raises:
        MergeError: The folders do not fit, a path clashes, or integer tensors that should be equal differ.
    """
    check_paths(config)
    folders = [ModelFolder(path) for path in config.models]
    plan = make_plan(config, folders)
    partial = config.out.parent / f".{config.out.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)  # what a killed run left
    partial.mkdir(parents=True)
    try:
        _copy_other_files(folders[0], partial, config)
        file_hashes = _write_tensors(config, folders, plan, partial, progress or (lambda done, total: None))
        manifest = _manifest(config, folders, plan, file_hashes)
        (partial / MANIFEST_NAME).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        _put_in_place(partial, config.out)
    finally:
        for folder in folders:
            folder.close()
        shutil.rmtree(partial, ignore_errors=True)
    logger.info("merged %d models into %s", len(folders), config.out)
    return manifest


def _write_tensors(
    config: MergeConfig, folders: Sequence[ModelFolder], plan: Sequence[TensorPlan], path: Path, progress: Progress
) -> dict[str, str]:
    total = sum(tensor.info.num_bytes for tensor in plan)
    done = 0
    writer = FolderWriter(path, (tensor.info for tensor in plan), max_shard_bytes=config.max_shard_bytes)
    with writer:
        for tensor in plan:
            for start, stop in _row_ranges(tensor.info):
                piece = _make_piece(config, folders, tensor, start, stop)
                writer.write(piece)
                done += piece.numel() * piece.element_size()
                progress(done, total)
    return writer.sha256


def _make_piece(
    config: MergeConfig, folders: Sequence[ModelFolder], tensor: TensorPlan, start: int, stop: int
) -> Tensor:
    name, dtype = tensor.info.name, tensor.info.dtype
    if tensor.is_merged:
        pieces = (folder.read_rows(name, start, stop) for folder in folders)
        return METHODS[config.method](pieces, config.model_weights).to(dtype)
    piece = folders[0].read_rows(name, start, stop)
    if not dtype.is_floating_point:
        for other in folders[1:]:
            if not torch.equal(piece, other.read_rows(name, start, stop)):
                raise MergeError(
                    f"integer values differ and cannot be averaged. {other.path}: {name}. Merge models "
                    "that share them, or leave that model out."
                )
    return piece.to(dtype)


def _row_ranges(info: TensorInfo) -> Iterator[tuple[int, int]]:
    if not info.shape:
        yield 0, 1
        return
    rows = max(1, _PIECE_ELEMENTS // max(1, prod(info.shape[1:])))
    for start in range(0, info.shape[0], rows):
        yield start, min(start + rows, info.shape[0])


def _copy_other_files(first: ModelFolder, path: Path, config: MergeConfig) -> None:
    def ignored(folder: str, names: list[str]) -> list[str]:
        at_top = Path(folder) == first.path
        return [
            name
            for name in names
            if name.endswith(_WEIGHT_SUFFIXES)
            or name.endswith(".index.json")
            or (at_top and name in (INDEX_NAME, MANIFEST_NAME, ".git", "__pycache__"))
        ]

    shutil.copytree(first.path, path, ignore=ignored, dirs_exist_ok=True)
    config_path = path / "config.json"
    if config.dtype is not None and config_path.is_file():
        document = json.loads(config_path.read_text(encoding="utf-8"))
        config_path.write_text(json.dumps(_with_dtype(document, config.dtype), indent=2) + "\n", encoding="utf-8")


def _with_dtype(document: Any, dtype: str) -> Any:
    if not isinstance(document, dict):
        return document
    return {
        key: dtype if key in ("dtype", "torch_dtype") and isinstance(value, str) else _with_dtype(value, dtype)
        for key, value in document.items()
    }


def _manifest(
    config: MergeConfig, folders: Sequence[ModelFolder], plan: Sequence[TensorPlan], file_hashes: dict[str, str]
) -> dict[str, Any]:
    return {
        "format": MANIFEST_FORMAT,
        "method": config.method,
        "models": [
            {"path": str(folder.path), "weight": weight, "sha256": folder.sha256()}
            for folder, weight in zip(folders, config.model_weights, strict=True)
        ],
        "only": list(config.only),
        "dtype": config.dtype,
        "num_merged": sum(tensor.is_merged for tensor in plan),
        "num_copied": sum(not tensor.is_merged for tensor in plan),
        "sha256": file_hashes,
    }


def _put_in_place(partial: Path, out: Path) -> None:
    for folder, _, names in os.walk(partial):
        for name in names:
            _sync(Path(folder) / name)
        _sync(Path(folder))
    old = out.parent / f".{out.name}.old"
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        out.rename(old)
    partial.rename(out)
    _sync(out.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
