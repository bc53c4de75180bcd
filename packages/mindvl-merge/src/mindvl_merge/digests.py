# SPDX-License-Identifier: Apache-2.0
"""Content digests of tensors and models that do not depend on how tensors are distributed over files.

Used while run.py reads and writes. A tensor is cut into blocks of `BLOCK_VALUES` values (block_ranges); the digest of a
tensor is XXH3-128 over the XXH3-128 digests of its blocks, and that of a model is XXH3-128 over the sorted lines
`name dtype shape digest`. XXH3 detects every accidental change at the speed of memory; it is not a signature against
deliberate changes.
"""

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path

import numpy as np
import xxhash

from .directory import ModelDirectory
from .headers import DTYPE_NAMES, TensorInfo

ALGORITHM = "xxh3-128 of blocks"
BLOCK_VALUES = 2**20


def block_ranges(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Ranges of values of the flattened tensor: whole rows where a row has at most `BLOCK_VALUES` values."""
    total = prod(shape)
    row = prod(shape[1:]) if shape else 1
    step = BLOCK_VALUES if row > BLOCK_VALUES or row == 0 else max(1, BLOCK_VALUES // row) * row
    for start in range(0, total, step):
        yield start, min(start + step, total)


def tensor_digest(blocks: Iterable[bytes]) -> str:
    """The digest of a tensor from those of its blocks, in order."""
    digest = xxhash.xxh3_128()
    for block in blocks:
        digest.update(block)
    return digest.hexdigest()


def model_digest(infos: Iterable[TensorInfo], digests: Mapping[str, str]) -> str:
    """The digest of a model from those of its tensors."""
    digest = xxhash.xxh3_128()
    for info in sorted(infos, key=lambda one: one.name):
        digest.update(f"{info.name} {DTYPE_NAMES[info.dtype]} {list(info.shape)} {digests[info.name]}\n".encode())
    return digest.hexdigest()


def directory_digest(path: Path) -> str:
    """Read the weights of a model directory once and return their digest.

    Raises:
        DirectoryError: The directory or one of its files is damaged.
    """
    with ModelDirectory(path) as directory:
        digests = {name: stored_digest(directory, name) for name in directory.tensors}
        return model_digest(directory.tensors.values(), digests)


def stored_digest(directory: ModelDirectory, name: str) -> str:
    """Read one tensor and return its digest."""
    blocks = block_ranges(directory.tensors[name].shape)
    return tensor_digest(
        xxhash.xxh3_128_digest(directory.read(name, start, stop).view(np.uint8).data) for start, stop in blocks
    )
