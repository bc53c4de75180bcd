# SPDX-License-Identifier: Apache-2.0
"""Which samples of a source one epoch used: a bit for each.

Used by the ledger to find samples used twice, or never.
"""

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from mindvl_data.plan.sources import SourceIndex

_MOST_ROWS = 1 << 30  # of a shard; a damaged log must not ask for memory without end


class EpochUse:
    """A bit for every sample of an epoch, by shard, grown as samples are met."""

    def __init__(self) -> None:
        self._bits: dict[str, bytearray] = {}

    def add(self, shard: str, row: int) -> bool:
        """Note a use; False when the sample was used before, or cannot exist."""
        if not 0 <= row < _MOST_ROWS:
            return False
        bits = self._bits.get(shard)
        if bits is None:
            bits = self._bits[shard] = bytearray()
        place, bit = row >> 3, 1 << (row & 7)
        if place >= len(bits):
            bits.extend(bytes(place + 1 - len(bits)))
        if bits[place] & bit:
            return False
        bits[place] |= bit
        return True

    def compare(self, usable: Iterable[tuple[str, NDArray[np.bool_]]]) -> str | None:
        """What differs from the samples that could be used, (shard, whether each can be used); None: nothing."""
        left = dict(self._bits)
        missing, extra, first = 0, 0, ""
        for shard, can in usable:
            packed = np.frombuffer(bytes(left.pop(shard, b"")), np.uint8)
            used = np.zeros(max(len(can), 8 * len(packed)), np.bool_)
            used[: 8 * len(packed)] = np.unpackbits(packed, bitorder="little")
            can = np.pad(can, (0, len(used) - len(can)))
            missing += int((can & ~used).sum())
            extra += int((used & ~can).sum())
            if not first and (can != used).any():
                first = f"{shard} row {int((can != used).argmax())}"
        for shard, bits in left.items():
            extra += sum(byte.bit_count() for byte in bits)
            first = first or shard
        if not missing and not extra:
            return None
        return f"{missing} usable samples are missing, {extra} are not usable, the first is {first}"


class UsableSamples:
    """(name, whether each sample can be in a row) of each shard of a source; found once, kept as bits."""

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
