# SPDX-License-Identifier: Apache-2.0
"""Where the patches of a pack are put, and the memory an image passes through on its way there.

Used between images and collate. A pack is tens of megabytes: patches are cut straight into it, and the steps before
reuse their memory, because to get fresh pages from the system costs as much as a tenth of all the work.
"""

import numpy as np
from numpy.typing import NDArray

_LARGEST_KEPT = 1 << 24  # bytes; what a huge image takes is given back


class Scratch:
    """Memory for one image after another. For one thread; what it gives is overwritten by the next image."""

    def __init__(self) -> None:
        self._kept: dict[str, NDArray[np.uint8]] = {}

    def take(self, step: str, count: int) -> NDArray[np.uint8]:
        """`count` bytes of any value for one step of the work; other steps have other memory."""
        if count > _LARGEST_KEPT:
            return np.empty(count, np.uint8)
        kept = self._kept.get(step)
        if kept is None or len(kept) < count:
            kept = self._kept[step] = np.empty(count, np.uint8)
        return kept[:count]


class PatchRoom:
    """The patches of the images of a pack, end to end.

    Args:
        num_patches: Room for so many.
        patch_dim: Values of a patch.
        scratch: Of the thread that fills the room; a new one otherwise.
    """

    def __init__(self, num_patches: int, patch_dim: int, scratch: Scratch | None = None) -> None:
        self.scratch = scratch or Scratch()
        self.used = 0  # patches; lower it again to take back what was begun
        self._patches = np.empty((num_patches, patch_dim), np.uint8)

    def take(self, count: int) -> NDArray[np.uint8]:
        """Room for the next `count` patches."""
        assert self.used + count <= len(self._patches)
        self.used += count
        return self._patches[self.used - count : self.used]

    def since(self, start: int) -> NDArray[np.uint8]:
        """What was put in from patch `start` on."""
        return self._patches[start : self.used]
