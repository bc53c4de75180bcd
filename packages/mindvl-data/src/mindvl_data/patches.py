# SPDX-License-Identifier: Apache-2.0
"""The buffer for the patches of a packed sequence, and reusable memory for decoding and resizing.

Used between images and collate. The patches of a pack take tens of megabytes: they are written directly to one buffer,
and the steps before reuse their memory, because allocating new pages would cost as much as a tenth of the time.
"""

import numpy as np
from numpy.typing import NDArray

_LARGEST_KEPT = 1 << 24  # bytes; larger arrays are not kept


class Scratch:
    """Arrays that are reused for each image, so their content is overwritten by the next one. Not thread-safe."""

    def __init__(self) -> None:
        self._kept: dict[str, NDArray[np.uint8]] = {}

    def take(self, step: str, count: int) -> NDArray[np.uint8]:
        """An uninitialized array of `count` bytes; each step has its own memory."""
        if count > _LARGEST_KEPT:
            return np.empty(count, np.uint8)
        kept = self._kept.get(step)
        if kept is None or len(kept) < count:
            kept = self._kept[step] = np.empty(count, np.uint8)
        return kept[:count]


class PatchBuffer:
    """The concatenated patches of the images of a pack.

    Args:
        num_patches: Capacity in patches.
        patch_dim: Number of values in a patch.
        scratch: Reusable memory of the thread that writes the patches; a new one if None.
    """

    def __init__(self, num_patches: int, patch_dim: int, scratch: Scratch | None = None) -> None:
        self.scratch = scratch or Scratch()
        self.used = 0  # number of patches; decrease it to remove the last ones
        self._patches = np.empty((num_patches, patch_dim), np.uint8)

    def take(self, count: int) -> NDArray[np.uint8]:
        """An uninitialized view for the next `count` patches."""
        assert self.used + count <= len(self._patches)
        self.used += count
        return self._patches[self.used - count : self.used]

    def since(self, start: int) -> NDArray[np.uint8]:
        """The patches from `start` on."""
        return self._patches[start : self.used]
