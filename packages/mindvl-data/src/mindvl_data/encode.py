# SPDX-License-Identifier: Apache-2.0
"""RawSample -> Encoding (token ids and media grids, nothing decoded) -> TokenizedSample (with pixels).

Comes after reading, before collate. Measuring and loading both go through `encode_sample`, so that a sample has the
length that was planned for it.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindvl_data.config import ImageConfig, SampleRules
from mindvl_data.errors import BadSample
from mindvl_data.images import decode, smart_resize, to_patches
from mindvl_data.samples import parse_sample
from mindvl_data.tokenization import Tokenizer, expand
from mindvl_data.types import IGNORE_INDEX, MediaSize, RawSample, TokenizedSample

Grid = tuple[int, int, int]  # patches along time, height, width


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """What a sample becomes, apart from its pixels."""

    ids: NDArray[np.int64]  # [S], one placeholder per picture or video
    learned: NDArray[np.bool_]  # [S]
    grids: tuple[Grid, ...]  # of the media that are used, in order
    image: ImageConfig  # the picture limits that hold for this sample
    num_tokens: int  # placeholders repeated
    num_patches: int


def encode_sample(raw: RawSample, *, rules: SampleRules, tokenizer: Tokenizer) -> Encoding:
    """Tokens and grids of one sample.

    Raises:
        BadSample: The record or a size cannot be used, or the template refuses the sample.
    """
    sample = parse_sample(raw)
    encoded = tokenizer.encode(sample, image_scales(raw.sizes, rules.image))
    grids = tuple(_image_grid(size, rules.image) for size in raw.sizes)
    num_patches = sum(t * h * w for t, h, w in grids)
    return Encoding(
        ids=encoded.ids,
        learned=encoded.learned,
        grids=grids,
        image=rules.image,
        num_tokens=len(encoded.ids) - len(grids) + num_patches // rules.image.spatial_merge_size**2,
        num_patches=num_patches,
    )


def decode_sample(raw: RawSample, encoding: Encoding, *, tokenizer: Tokenizer) -> TokenizedSample:
    """Decode, resize and cut what the encoding uses; repeat its placeholders.

    Raises:
        BadSample: A picture or video cannot be decoded, or is not what the index says.
    """
    image = encoding.image
    pixels = [_no_patches(image.patch_dim)]
    for content, size, grid in zip(raw.media, raw.sizes, encoding.grids, strict=False):
        picture = decode(content, decode_limit=image.decode_limit)
        if (picture.height, picture.width) != (size.height, size.width):
            raise BadSample("picture has another size than the index says")
        patches, found = to_patches(picture, image)
        assert found == grid
        pixels.append(patches)
    merged = [t * h * w // image.spatial_merge_size**2 for t, h, w in encoding.grids]
    input_ids, labels = expand(encoding, merged, tokenizer.image_pad_id)
    return TokenizedSample(
        input_ids=input_ids,
        labels=labels,
        pixel_values=np.concatenate(pixels),
        image_grid_thw=np.array(encoding.grids, np.int64).reshape(-1, 3),
        pixel_values_videos=_no_patches(2 * image.patch_dim),
        video_grid_thw=np.zeros((0, 3), np.int64),
        seconds_per_grid=np.zeros(0, np.float64),
    )


def placeholder(length: int, *, patch_dim: int, pad_id: int) -> TokenizedSample:
    """Stands for a sample that cannot be decoded: as long as planned; learns nothing."""
    return TokenizedSample(
        input_ids=np.full(length, pad_id, np.int64),
        labels=np.full(length, IGNORE_INDEX, np.int64),
        pixel_values=_no_patches(patch_dim),
        image_grid_thw=np.zeros((0, 3), np.int64),
        pixel_values_videos=_no_patches(2 * patch_dim),
        video_grid_thw=np.zeros((0, 3), np.int64),
        seconds_per_grid=np.zeros(0, np.float64),
    )


def image_scales(sizes: tuple[MediaSize, ...], image: ImageConfig) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """(original, resized) size of each picture."""
    return [((size.height, size.width), _resized(size, image)) for size in sizes]


def _image_grid(size: MediaSize, image: ImageConfig) -> Grid:
    height, width = _resized(size, image)
    return 1, height // image.patch_size, width // image.patch_size


def _resized(size: MediaSize, image: ImageConfig) -> tuple[int, int]:
    budget: dict[str, Any] = {"min_pixels": image.min_pixels, "max_pixels": image.max_pixels}
    return smart_resize(size.height, size.width, multiple=image.multiple, **budget)


def _no_patches(patch_dim: int) -> NDArray[np.uint8]:
    return np.zeros((0, patch_dim), np.uint8)
