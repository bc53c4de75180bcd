# SPDX-License-Identifier: Apache-2.0
"""Which samples of a source one epoch used: a bit for each.

Used by the ledger to find samples used twice, or never.
"""

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from mindvl_data.order.sources import SourceIndex

_BLOCK = 512  # samples of a shard whose bits are kept together; a damaged log cannot ask for more than it has lines


class EpochUse:
    """A bit for every sample of an epoch, by block of a shard, grown as samples are met."""

    def __init__(self) -> None:
        self._bits: dict[str, dict[int, bytearray]] = {}

    def add(self, shard: str, row: int) -> bool:
        """Note a use; False when the sample was used before."""
        blocks = self._bits.setdefault(shard, {})
        number, place = divmod(row, _BLOCK)
        bits = blocks.get(number)
        if bits is None:
            bits = blocks[number] = bytearray(_BLOCK // 8)
        bit = 1 << (place & 7)
        if bits[place >> 3] & bit:
            return False
        bits[place >> 3] |= bit
        return True

    def compare(self, usable: Iterable[tuple[str, NDArray[np.bool_]]]) -> str | None:
        """What differs from the samples that could be used, (shard, whether each can be used); None: nothing."""
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
    """(name, whether each sample can be in a pack) of each shard of a source; found once, kept as bits."""

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
