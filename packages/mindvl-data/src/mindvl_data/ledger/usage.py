# SPDX-License-Identifier: Apache-2.0
"""The samples of a source used in one epoch, one bit per sample.

Used by the ledger to find repeated and missing samples.
"""

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from mindvl_data.order.sources import SourceIndex

_BLOCK = 512  # samples per allocation; bounds the memory for damaged logs by their number of lines


class EpochUse:
    """One bit per sample of an epoch, allocated in blocks of a shard as samples are added."""

    def __init__(self) -> None:
        self._bits: dict[str, dict[int, bytearray]] = {}

    def add(self, shard: str, sample_index: int) -> bool:
        """Record a use; return False if the sample was used before."""
        blocks = self._bits.setdefault(shard, {})
        number, offset = divmod(sample_index, _BLOCK)
        bits = blocks.get(number)
        if bits is None:
            bits = blocks[number] = bytearray(_BLOCK // 8)
        bit = 1 << (offset & 7)
        if bits[offset >> 3] & bit:
            return False
        bits[offset >> 3] |= bit
        return True

    def compare(self, usable: Iterable[tuple[str, NDArray[np.bool_]]]) -> str | None:
        """Compare with the usable samples, (shard, one flag per sample); return the difference, or None if equal."""
        left = {shard: dict(blocks) for shard, blocks in self._bits.items()}
        missing, extra, first = 0, 0, ""
        for shard, can in usable:
            blocks = left.get(shard, {})
            used = np.zeros(-(-len(can) // _BLOCK) * _BLOCK, np.bool_)
            for start in range(0, len(used), _BLOCK):
                if bits := blocks.pop(start // _BLOCK, None):
                    packed = np.frombuffer(bytes(bits), np.uint8)
                    used[start : start + _BLOCK] = np.unpackbits(packed, bitorder="little")
            can = np.pad(can, (0, len(used) - len(can)))
            missing += int((can & ~used).sum())
            extra += int((used & ~can).sum())
            if not first and (can != used).any():
                first = f"{shard} sample {int((can != used).argmax())}"
        for shard, blocks in left.items():
            extra += sum(byte.bit_count() for bits in blocks.values() for byte in bits)
            first = first or (shard if blocks else "")
        if not missing and not extra:
            return None
        return f"{missing} usable samples are missing, {extra} are not usable, the first is {first}"


class UsableSamples:
    """(name, one flag per sample that fits into a pack) of each shard of a source; computed once, stored as bits."""

    def __init__(self, source: SourceIndex, seq_length: int, max_patches: int) -> None:
        self._shards: list[tuple[str, NDArray[np.uint8], int]] = []
        for number, name in enumerate(source.index.shards.names):
            tokens, patches = source.lengths(number)
            rows = source.used_rows(number)
            can = np.zeros(len(tokens), np.bool_)
            can[rows] = (tokens[rows] > 0) & (tokens[rows] <= seq_length) & (patches[rows] <= max_patches)
            self._shards.append((name, np.packbits(can), len(can)))

    def __iter__(self) -> Iterator[tuple[str, NDArray[np.bool_]]]:
        for name, bits, count in self._shards:
            yield name, np.unpackbits(bits, count=count).astype(np.bool_)
