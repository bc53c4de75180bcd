# SPDX-License-Identifier: Apache-2.0
"""The packed pack that a plan is made for: its segments and images, as the layers will meet them.

Comes first in the planner; blocks.py turns it into bytes and operations. A plan needs two: a full one for the memory, a
usual one for the time.
"""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

from mindvl_model.config import VisionConfig
from mindvl_model.vision.positions import Grid, patch_order

# Of the mixture of docs/design/evidence/loader.md ("packing"): 48 % of its tokens are visual, a pack may have 1.25 times
# that, and attention over its segments costs as much as over equal ones of the ratio of mean square to mean length.
VISUAL_SHARE = 0.48
VISUAL_OF_PICTURED = 0.67  # the same of those samples alone that have images
VISUAL_LIMIT = 1.25
SEGMENT_TOKENS = 1920


@dataclass(frozen=True, kw_only=True)
class Pack:
    """One packed pack, which is one microbatch."""

    segments: tuple[int, ...]  # tokens of each, padding included
    grids: tuple[Grid, ...]  # patches along time, height, width of each image

    @cached_property
    def tokens(self) -> int:
        """T."""
        return sum(self.segments)

    @cached_property
    def patches(self) -> int:
        """P."""
        return sum(time * height * width for time, height, width in self.grids)

    @cached_property
    def causal_pairs(self) -> int:
        """Query-key pairs of causal attention inside the segments."""
        return sum(length * (length + 1) // 2 for length in self.segments)


@lru_cache(maxsize=256)
def image_segments(grids: tuple[Grid, ...], vision: VisionConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Patches that attend to each other: in layers of full attention, and in the windows of the others."""
    if not grids:
        return (), ()
    order = patch_order(grids, vision)
    return order.full.lengths, order.windows.lengths


def typical_pack(
    seq_length: int,
    *,
    max_pixels: int,
    vision: VisionConfig,
    visual_tokens: float,
    segment_tokens: int = SEGMENT_TOKENS,
) -> Pack:
    """A pack of equal segments with as few, as large images as its visual tokens allow.

    Args:
        max_pixels: Of one image.
        visual_tokens: In the pack; rounded to whole images of nearly that many.
    """
    count = max(1, round(seq_length / segment_tokens))
    each, more = divmod(seq_length, count)
    segments = tuple(each + (place < more) for place in range(count))
    side = vision.patch_size * vision.spatial_merge_size
    largest = max(1, max_pixels // side**2)
    wanted = round(min(visual_tokens, seq_length))
    if not wanted:
        return Pack(segments=segments, grids=())
    images = math.ceil(wanted / largest)
    grid = image_grid(wanted // images, vision.spatial_merge_size)
    return Pack(segments=segments, grids=(grid,) * images)


def image_grid(visual_tokens: int, merge: int) -> Grid:
    """Patches (1, height, width) of a nearly square image of at most that many visual tokens."""
    height = max(1, math.isqrt(visual_tokens))
    return 1, height * merge, max(1, visual_tokens // height) * merge
