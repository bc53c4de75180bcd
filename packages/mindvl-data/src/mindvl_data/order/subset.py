# SPDX-License-Identifier: Apache-2.0
"""The subset of a source's samples in use: the first samples, a keyed share of them, or both.

Comes after the index, before the shuffle. The choice depends on the name of the source and on its index, not on seed or
epoch, so every epoch and every run uses the same samples. A share is the beginning of a keyed permutation of each
shard, which needs no table of samples; a larger share contains a smaller one except for one or two samples per shard.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

from mindvl_data.errors import DataError
from mindvl_data.order.shuffle import permute


class Subset:
    """The samples in use, numbered from 0 inside each shard.

    Args:
        shard_sizes: Samples of each shard.
        first: Number of samples to use, in the order of the index; None: all.
        fraction: Share of these samples to use, rounded to whole samples; None: all.
        source: Name of the source; the key of the choice, also used in errors.

    Raises:
        DataError: The subset is empty.
    """

    def __init__(self, shard_sizes: NDArray[np.int64], *, first: int | None, fraction: float | None, source: str):
        self._source = source
        before = np.cumsum(shard_sizes) - shard_sizes
        self._offered = shard_sizes if first is None else np.clip(first - before, 0, shard_sizes)
        self._is_share = fraction is not None and fraction < 1
        self.sizes: NDArray[np.int64] = self._offered  # samples in use of each shard
        if fraction is not None and fraction < 1:
            ends = np.floor(np.cumsum(self._offered) * fraction + 0.5).astype(np.int64)
            self.sizes = np.diff(ends, prepend=0)
        self.num_samples = int(self.sizes.sum())
        if not self.num_samples:
            raise DataError(
                f"source {source!r}: first={first} and fraction={fraction} select none of {int(shard_sizes.sum())} samples. "
                "Raise them."
            )

    def rows(self, shard: int, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows in the shard of the samples in use with these numbers (each below `sizes[shard]`)."""
        if not self._is_share:
            return numbers
        digest = hashlib.blake2b(f"subset\0{self._source}\0{shard}".encode(), digest_size=8).digest()
        return permute(numbers.astype(np.uint64), int(self._offered[shard]), int.from_bytes(digest, "little"))
