# SPDX-License-Identifier: Apache-2.0
"""The typical packed sequence (pack) of a layout search: sequence lengths and images.

The first step of the layout search; blocks.py converts it to bytes and operations. A search uses two packs: one with the
maximum number of images for memory, an average one for time.
"""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

from mindvl_model.config import VisionConfig
from mindvl_model.vision.positions import Grid, patch_order

# Measured for the data mixture of docs/design/evidence/loader.md ("packing"): 48 % of its tokens are
# visual, the limit of a pack is 1.25 times that, and SEGMENT_TOKENS is the ratio of mean square to mean sample length.
VISUAL_SHARE = 0.48
VISUAL_OF_PICTURED = 0.67  # the same for samples with images only
VISUAL_LIMIT = 1.25
SEGMENT_TOKENS = 1920
LOSS_SHARE = 0.37  # loss tokens of all tokens; docs/design/evidence/layout-search.md


@dataclass(frozen=True, kw_only=True)
class Pack:
    """One packed sequence, which is one microbatch."""

    segments: tuple[int, ...]  # tokens of each sample, with padding
    grids: tuple[Grid, ...]  # patches along time, height, width of each image
    num_loss_tokens: int | None = None  # None: all tokens

    @cached_property
    def tokens(self) -> int:
        """Number of tokens T."""
        return sum(self.segments)

    @cached_property
    def patches(self) -> int:
        """Number of patches P."""
        return sum(time * height * width for time, height, width in self.grids)

    @cached_property
    def causal_pairs(self) -> int:
        """Query-key pairs of causal attention inside the segments."""
        return sum(length * (length + 1) // 2 for length in self.segments)


@lru_cache(maxsize=256)
def image_segments(grids: tuple[Grid, ...], vision: VisionConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Lengths of attention segments in patches: with full attention, and with windowed attention."""
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
    loss_share: float = 1.0,
) -> Pack:
    """A pack of equal samples with as few and as large images as possible.

    Args:
        max_pixels: Maximum pixels of one image.
        visual_tokens: Visual tokens of the pack; rounded to whole images.
        loss_share: Loss tokens of all tokens.
    """
    count = max(1, round(seq_length / segment_tokens))
    each, more = divmod(seq_length, count)
    segments = tuple(each + (index < more) for index in range(count))
    num_loss_tokens = round(loss_share * seq_length)
    side = vision.patch_size * vision.spatial_merge_size
    largest = max(1, max_pixels // side**2)
    wanted = round(min(visual_tokens, seq_length))
    if not wanted:
        return Pack(segments=segments, grids=(), num_loss_tokens=num_loss_tokens)
    images = math.ceil(wanted / largest)
    grid = image_grid(wanted // images, vision.spatial_merge_size)
    return Pack(segments=segments, grids=(grid,) * images, num_loss_tokens=num_loss_tokens)


def image_grid(visual_tokens: int, merge: int) -> Grid:
    """Patches (1, height, width) of a nearly square image of at most that many visual tokens."""
    height = max(1, math.isqrt(visual_tokens))
    return 1, height * merge, max(1, visual_tokens // height) * merge
