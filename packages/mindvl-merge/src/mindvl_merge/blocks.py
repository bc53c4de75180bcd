# SPDX-License-Identifier: Apache-2.0
"""Compute one block of one output tensor: read it from every parent, combine, check, write.

Comes after sources.py; run.py calls `BlockMaker.make` from several threads. A block is read and computed in chunks that stay in
the cache of a core, so that memory depends neither on the size of the models nor on that of a tensor.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import ml_dtypes
import numpy as np
import xxhash

from .config import DROPPING, MergeConfig
from .digests import BLOCK_VALUES, block_ranges
from .directory import ModelDirectory
from .errors import DirectoryError, MergeError
from .methods import angle, average, dare, slerp, task_arithmetic, thresholds, ties
from .methods.values import Values, accumulator
from .missing_rows import fill_missing_rows
from .names import canonical_name
from .quantization import read_values
from .sources import OutputTensor
from .writer import DirectoryWriter

CHUNK_VALUES = 2**16

Combine = Callable[[Sequence[Values], int], Values]  # blocks of all parents and the position of their first value


@dataclass(frozen=True, kw_only=True)
class MadeBlock:
    """Digests of a finished block."""

    num_bytes: int
    output: bytes
    sources: tuple[bytes | None, ...]  # None where rows are matched by token


class BlockMaker:
    """Makes blocks of output tensors; safe in several threads."""

    def __init__(self, config: MergeConfig, directories: Sequence[ModelDirectory], writer: DirectoryWriter) -> None:
        self._config = config
        self._directories = directories
        self._writer = writer
        self._local = threading.local()

    def combiner(self, tensor: OutputTensor) -> Combine | None:
        """The function that merges blocks of this tensor; None if it is copied. Some methods read the tensor first."""
        config, weights = self._config, tensor.weights
        if not tensor.is_merged:
            return None
        if config.method == "average":
            return lambda blocks, position: average(blocks, weights, self._scratch(blocks))
        if config.method == "slerp":
            found = angle(self._pass(tensor))
            return lambda blocks, position: slerp(blocks, weights, found)
        if config.method == "task_arithmetic":
            return lambda blocks, position: task_arithmetic(blocks, weights, scale=config.scale)
        if config.method == "ties":
            limits = thresholds(lambda: self._pass(tensor), tensor.info.num_values, config.density)
            return lambda blocks, position: ties(blocks, weights, limits, scale=config.scale)
        drop = partial(dare, scale=config.scale, density=config.density, seed=config.seed)
        name, elect_signs = canonical_name(tensor.info.name), config.method == "dare_ties"
        return lambda blocks, position: drop(blocks, weights, name=name, position=position, elect_signs=elect_signs)

    def make(self, tensor: OutputTensor, combine: Combine | None, start: int, stop: int) -> MadeBlock:
        """Write values `start` to `stop` of the flattened output tensor.

        Raises:
            MergeError: A value is not finite, or integers of the models differ.
        """
        num_bytes = (stop - start) * tensor.info.dtype.itemsize
        if self._is_empty(tensor, start, stop):
            sizes = [
                self._info(tensor, number).dtype.itemsize * (stop - start) for number in range(len(tensor.sources))
            ]
            return MadeBlock(
                num_bytes=num_bytes, output=_digest_of_zeros(num_bytes), sources=tuple(map(_digest_of_zeros, sizes))
            )
        written, read = xxhash.xxh3_128(), [xxhash.xxh3_128() for _ in tensor.sources]
        with np.errstate(all="ignore"):
            for begin, end in self._chunks(tensor, start, stop):
                blocks = self._read(tensor, begin, end, read)
                result = self._merged(tensor, combine, blocks, begin)
                self._writer.write(tensor.info.name, begin, result)
                written.update(result.view(np.uint8).data)
        digests = (
            None if source.rows is not None else digest.digest()
            for source, digest in zip(tensor.sources, read, strict=True)
        )
        return MadeBlock(num_bytes=num_bytes, output=written.digest(), sources=tuple(digests))

    def _merged(self, tensor: OutputTensor, combine: Combine | None, blocks: list[Values], begin: int) -> Values:
        dtype = tensor.info.dtype
        if not tensor.info.is_float:
            self._refuse_different_integers(tensor, blocks)
            return blocks[0]
        values = blocks[0] if combine is None else combine(blocks, begin)
        if combine is not None and self._config.method in DROPPING:
            _refuse_non_finite_parent(self._directories, tensor, blocks, begin)
        _refuse_non_finite(self._directories, tensor, values, blocks, begin)
        if values.dtype == dtype:
            return values
        result = self._buffer("output", values.size * dtype.itemsize).view(dtype)
        np.copyto(result, values, casting="unsafe")
        return result

    def _read(
        self, tensor: OutputTensor, begin: int, end: int, digests: Sequence[xxhash.xxh3_128 | None]
    ) -> list[Values]:
        blocks: list[Values] = []
        for number, source in enumerate(tensor.sources):
            directory = self._directories[source.parent]
            itemsize = directory.tensors[source.name].dtype.itemsize
            blocks.append(
                read_values(
                    directory,
                    source,
                    begin,
                    end,
                    self._buffer(f"parent {number}", (end - begin) * itemsize),
                    tensor.info.shape,
                    fallback=blocks[0] if blocks else None,
                    digest=digests[number],
                )
            )
        return fill_missing_rows(tensor, blocks, begin, end)

    def _pass(self, tensor: OutputTensor) -> Iterator[Sequence[Values]]:
        """All blocks of a tensor, in order."""
        for start, stop in block_ranges(tensor.info.shape):
            yield self._read(tensor, start, stop, [None] * len(tensor.sources))

    def _chunks(self, tensor: OutputTensor, start: int, stop: int) -> Iterator[tuple[int, int]]:
        in_rows = any(source.rows is not None or source.scales is not None for source in tensor.sources)
        step = stop - start if in_rows or self._config.method not in ("average", "slerp") else CHUNK_VALUES
        for begin in range(start, stop, step):
            yield begin, min(begin + step, stop)

    def _is_empty(self, tensor: OutputTensor, start: int, stop: int) -> bool:
        """Whether all parents have a hole of a sparse file here; every method makes zeros of zeros."""
        return all(
            source.rows is None and self._directories[source.parent].is_hole(source.name, start, stop)
            for source in tensor.sources
        )

    def _info(self, tensor: OutputTensor, number: int) -> Any:
        source = tensor.sources[number]
        return self._directories[source.parent].tensors[source.name]

    def _refuse_different_integers(self, tensor: OutputTensor, blocks: Sequence[Values]) -> None:
        for source, block in zip(tensor.sources[1:], blocks[1:], strict=True):
            if not np.array_equal(blocks[0], block):
                other, first = self._directories[source.parent], self._directories[0]
                raise MergeError(
                    f"{other.path / other.tensors[source.name].file}: integer tensor {source.name} differs from that in "
                    f"{first.path} and cannot be averaged. Merge models with equal integer tensors."
                )

    def _buffer(self, name: str, num_bytes: int) -> np.ndarray[Any, Any]:
        """Memory of this thread, used again for the next chunk."""
        buffers: dict[str, np.ndarray[Any, Any]] = self._local.__dict__.setdefault("buffers", {})
        if name not in buffers or buffers[name].nbytes < num_bytes:
            buffers[name] = np.empty(num_bytes, np.uint8)
        return buffers[name][:num_bytes]

    def _scratch(self, blocks: Sequence[Values]) -> tuple[Values, Values]:
        dtype, size = accumulator(blocks), len(blocks[0])
        one, two = (self._buffer(name, size * dtype.itemsize).view(dtype) for name in ("sum", "term"))
        return one, two


def _refuse_non_finite(
    directories: Sequence[ModelDirectory], tensor: OutputTensor, result: Values, blocks: Sequence[Values], begin: int
) -> None:
    """Check the result: NaN or infinity of any parent is in it too, except for methods that drop values."""
    limit = float(ml_dtypes.finfo(tensor.info.dtype).max)
    wide = result if result.dtype.itemsize >= 4 else result.astype(np.float32)
    if wide.size == 0 or (wide.max() <= limit and wide.min() >= -limit):  # false for NaN
        return
    _refuse_non_finite_parent(directories, tensor, blocks, begin)
    if np.isfinite(result.astype(tensor.info.dtype).astype(np.float64)).all():
        return  # rounded down to the largest number
    first = directories[0]
    raise MergeError(
        f"{first.path / first.tensors[tensor.info.name].file}: tensor {tensor.info.name} has values outside the range of "
        f"{tensor.info.dtype}. Choose another data type (--dtype) or weights that sum to 1."
    )


def _refuse_non_finite_parent(
    directories: Sequence[ModelDirectory], tensor: OutputTensor, blocks: Sequence[Values], begin: int
) -> None:
    """Check the values of every parent, and name the first parent with NaN or infinity."""
    columns = max(1, tensor.info.num_values // tensor.info.shape[0]) if tensor.info.shape else 1
    last = (begin + len(blocks[0]) - 1) // columns
    for source, block in zip(tensor.sources, blocks, strict=True):
        count = _num_non_finite(block)
        if count:
            parent = directories[source.parent]
            raise DirectoryError(
                f"{parent.path / parent.tensors[source.name].file}: tensor {source.name} has NaN or infinity ({count} values "
                f"in rows {begin // columns} to {last}). Train or copy this model again, or remove it from the merge."
            )


def _num_non_finite(block: Values) -> int:
    wide = block if block.dtype.itemsize >= 4 else block.astype(np.float32)
    return int(np.count_nonzero(~np.isfinite(wide)))


@lru_cache(maxsize=64)
def _digest_of_zeros(num_bytes: int) -> bytes:
    return xxhash.xxh3_128_digest(bytes(num_bytes))


assert CHUNK_VALUES <= BLOCK_VALUES
