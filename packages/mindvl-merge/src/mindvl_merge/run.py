# SPDX-License-Identifier: Apache-2.0
"""Merge model directories: check all of them, then stream blocks of tensors into a new directory.

Every parent is read once, in large pieces and by several threads; methods that need statistics of a whole tensor read that
tensor before. The result is written beside the output under a hidden name, synced, and renamed (publish.py), so that the
output appears only when it is complete. An interrupted merge continues with the tensors that its journal does not list.
"""

import errno
import hashlib
import json
import logging
import os
import resource
import shutil
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .adapters import are_adapters, merge_adapters
from .blocks import BlockMaker, MadeBlock
from .config import MergeConfig
from .digests import block_ranges, tensor_digest
from .directory import ModelDirectory
from .errors import MergeError
from .files import other_files, read_json, real_path
from .manifest import MANIFEST_NAME, manifest
from .output_path import check_paths
from .parents import check_parents
from .publish import partial_directory, recover, replace_directory
from .quantization import QUANTIZATION
from .sources import OutputTensor, Pairing, pair_tensors
from .writer import JOURNAL_NAME, DirectoryWriter, has_finished_tensors

logger = logging.getLogger(__name__)

_COMMIT_BYTES = 2**30  # written between two syncs; an interrupted merge repeats at most this much
_MAX_THREADS = 8
_NOT_OF_THE_MODEL = (".git", ".cache", "__pycache__")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")

Progress = Callable[[int, int], None]  # bytes done, total bytes


def merge(
    config: MergeConfig, *, progress: Progress | None = None, recorded: MergeConfig | None = None
) -> dict[str, Any]:
    """Carry out a merge, or continue one that was interrupted.

    Args:
        progress: Called after every block with written and total bytes.
        recorded: The configuration for the manifest, if the models are temporary copies of those that the user named.

    Returns:
        The manifest, also written to `merge.json` in the new directory.

    Raises:
        MergeError: The models are incompatible, have values that are not finite or integer tensors that differ; the
            output overlaps an input; the disk is full.
    """
    try:
        return _merge(config, recorded or config, progress or (lambda done, total: None))
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        to_do = "Free space or choose another output." if full else "Check the disk and the permissions."
        raise MergeError(
            f"{error.filename or config.out}: cannot be read or written ({error.strerror or error}), and nothing was "
            f"changed; the same command continues where this one ended. {to_do}"
        ) from error


def _merge(config: MergeConfig, recorded: MergeConfig, progress: Progress) -> dict[str, Any]:
    out = real_path(config.out)  # through a symbolic link to the directory itself
    recover(out)
    check_paths(config)
    if are_adapters(config):
        return merge_adapters(config, recorded, out, progress)
    directories = [ModelDirectory(path) for path in config.parents]
    try:
        _allow_open_files(sum(len(directory.files) for directory in directories))
        pairing = pair_tensors(config, directories)
        warnings = check_parents(config, directories)
        for directory in directories:
            directory.open_files()
        _refuse_small_disk(out, directories, pairing)
        with partial_directory(out, keep=(JOURNAL_NAME, "*.safetensors"), has_progress=has_finished_tensors) as partial:
            infos = [tensor.info for tensor in pairing.outputs]
            inputs = _inputs_digest(config, directories)
            with DirectoryWriter(partial, infos, max_shard_bytes=config.max_shard_bytes, inputs=inputs) as writer:
                _write_tensors(config, directories, pairing, writer, progress)
                document = manifest(recorded, directories, pairing, writer.finished, warnings)
                _copy_other_files(directories, partial, config)
                (partial / MANIFEST_NAME).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
                writer.finish()  # removes the journal, without which nothing continues
            replace_directory(partial, out)
    finally:
        for directory in directories:
            directory.close()
    for warning in warnings:
        logger.warning("%s", warning)
    logger.info("merged %d models into %s", len(config.models), config.out)
    return document


def _write_tensors(
    config: MergeConfig,
    directories: Sequence[ModelDirectory],
    pairing: Pairing,
    writer: DirectoryWriter,
    progress: Progress,
) -> None:
    total = sum(tensor.info.num_bytes for tensor in pairing.outputs)
    collector = _Collector(writer, total, progress)
    maker = BlockMaker(config, directories, writer)
    threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2)
    pool = ThreadPoolExecutor(threads, thread_name_prefix="merge")
    waiting: deque[tuple[OutputTensor, Future[MadeBlock]]] = deque()
    try:
        for tensor in pairing.outputs:
            if tensor.info.name in writer.finished:
                collector.skip(tensor)
                continue
            if tensor.info.num_values == 0:
                collector.finish(tensor, [])
                continue
            combine = maker.combiner(tensor)
            for start, stop in block_ranges(tensor.info.shape):
                waiting.append((tensor, pool.submit(maker.make, tensor, combine, start, stop)))
                while len(waiting) > 4 * threads:
                    one, future = waiting.popleft()
                    collector.add(one, future.result())
        for one, future in waiting:
            collector.add(one, future.result())
        collector.commit()
    finally:
        pool.shutdown(cancel_futures=True)


class _Collector:
    """Takes finished blocks in order, and commits tensors to the journal."""

    def __init__(self, writer: DirectoryWriter, total: int, progress: Progress) -> None:
        self._writer = writer
        self._total = total
        self._progress = progress
        self._done = 0
        self._since_commit = 0
        self._blocks: list[MadeBlock] = []  # of the current tensor
        self._num_values = 0
        self._records: dict[str, dict[str, Any]] = {}

    def skip(self, tensor: OutputTensor) -> None:
        """Count a tensor that an earlier process finished."""
        self._done += tensor.info.num_bytes
        self._progress(self._done, self._total)

    def add(self, tensor: OutputTensor, block: MadeBlock) -> None:
        """Add the next block; the last one of a tensor finishes it."""
        self._blocks.append(block)
        self._num_values += block.num_bytes // tensor.info.dtype.itemsize
        self._done += block.num_bytes
        self._since_commit += block.num_bytes
        if self._num_values == tensor.info.num_values:
            self.finish(tensor, self._blocks)
            self._blocks, self._num_values = [], 0
        self._progress(self._done, self._total)

    def finish(self, tensor: OutputTensor, blocks: Sequence[MadeBlock]) -> None:
        """Record the digests of a finished tensor."""
        columns = [[block.sources[number] for block in blocks] for number in range(len(tensor.sources))]
        self._records[tensor.info.name] = {
            "digest": tensor_digest(block.output for block in blocks),
            "sources": [
                None if source.rows is not None else tensor_digest(one for one in column if one is not None)
                for source, column in zip(tensor.sources, columns, strict=True)
            ],
        }
        if self._since_commit >= _COMMIT_BYTES:
            self.commit()

    def commit(self) -> None:
        """Write the finished tensors to the journal."""
        self._writer.commit(self._records)
        self._records, self._since_commit = {}, 0


def _inputs_digest(config: MergeConfig, directories: Sequence[ModelDirectory]) -> str:
    """Identifies configuration and inputs, so that only the same merge continues an interrupted one."""
    settings = {key: str(value) for key, value in asdict(config).items() if key not in ("overwrite",)}
    files = [
        (file, status.st_size, status.st_mtime_ns, status.st_ino)
        for directory in directories
        for file in directory.files
        for status in [(directory.path / file).stat()]
    ]
    return hashlib.sha256(json.dumps([settings, files], sort_keys=True).encode()).hexdigest()


def _allow_open_files(count: int) -> None:
    """Raise the soft limit of open files where many shards need it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * count + 256
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))


def _refuse_small_disk(out: Path, directories: Sequence[ModelDirectory], pairing: Pairing) -> None:
    allocated = sum(directory.allocated_bytes(file) for directory in directories for file in directory.files)
    needed = min(allocated, sum(tensor.info.num_bytes for tensor in pairing.outputs))  # holes stay holes
    parent = next(path for path in out.parents if path.exists())
    partial = out.parent / f".{out.name}.partial"
    present = sum(file.stat().st_blocks * 512 for file in partial.glob("*.safetensors")) if partial.is_dir() else 0
    free = shutil.disk_usage(parent).free + present
    if needed > free:
        raise MergeError(
            f"{out}: the result needs {needed / 1e6:,.1f} MB, but {free / 1e6:,.1f} MB are free there. Free space or "
            "choose another output."
        )


def _copy_other_files(directories: Sequence[ModelDirectory], path: Path, config: MergeConfig) -> None:
    def is_ignored(file: Path) -> bool:
        at_top = len(file.parts) == 1
        return (
            file.name.endswith((*_WEIGHT_SUFFIXES, ".index.json"))
            or file.name in _NOT_OF_THE_MODEL
            or (at_top and file.name == MANIFEST_NAME)
        )

    first = directories[0]
    for file in other_files(first.path, is_ignored):
        (path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(first.path / file, path / file)
    config_path = path / "config.json"
    if not config_path.is_file():
        return
    document = read_json(config_path)
    changed = _with_dtype(document, config.torch_dtype) if config.torch_dtype is not None else dict(document)
    changed.pop(QUANTIZATION, None)  # float8 values become bfloat16
    if isinstance(changed.get("text_config"), dict):
        changed["text_config"] = {key: value for key, value in changed["text_config"].items() if key != QUANTIZATION}
    if changed != document:
        config_path.write_text(json.dumps(changed, indent=2) + "\n", encoding="utf-8")


def _with_dtype(document: Any, dtype: str) -> Any:
    if not isinstance(document, dict):
        return document
    return {
        key: dtype if key in ("dtype", "torch_dtype") and isinstance(value, str) else _with_dtype(value, dtype)
        for key, value in document.items()
    }
