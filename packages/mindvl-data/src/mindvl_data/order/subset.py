# SPDX-License-Identifier: Apache-2.0
"""Which samples of a source are used at all: the first so many, a keyed share of them, or both.

Comes after the index, before the shuffle, which orders what is left. The choice depends on the name of the source and
on its index, not on seed or epoch, so every epoch and every run uses the same samples. A share is taken from each
shard by the first places of a keyed permutation: no table of samples, and a larger share holds (all but one or two
samples a shard of) a smaller one.
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
        first: Use only so many, in the order of the index; None: all.
        fraction: Then use this share of those, rounded to whole samples; None: all.
        source: Name of the source; the key of the choice, and named in errors.

    Raises:
        DataError: No sample is left.
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
                f"first={first} and fraction={fraction} leave none of {int(shard_sizes.sum())} samples. "
                f"Source {source!r}. Raise them."
            )

    def rows(self, shard: int, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows in the shard of the samples in use with these numbers (each below `sizes[shard]`)."""
        if not self._is_share:
            return numbers
        digest = hashlib.blake2b(f"subset\0{self._source}\0{shard}".encode(), digest_size=8).digest()
        return permute(numbers.astype(np.uint64), int(self._offered[shard]), int.from_bytes(digest, "little"))
