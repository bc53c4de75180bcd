# SPDX-License-Identifier: Apache-2.0
"""Encoded image -> uint8 patches: decode, resize to the pixel budget, split into patches.

Comes after the shards, before collate; used by training, evaluation and the resolution search. Sizes, resize and patch
order are those of the Qwen2-VL image processor of transformers (arXiv 2409.12191); normalization and the temporal copy
are done on the device.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mindvl_data.config import ImageConfig
from mindvl_data.decoding import DecodedImage, opened
from mindvl_data.errors import SampleError
from mindvl_data.image_files import open_image, orientation
from mindvl_data.patches import PatchBuffer, Scratch

MAX_ASPECT_RATIO = 200
MAX_WHOLE_PIXELS = 1 << 24  # images with more pixels are resized in strips
STRIP_PIXELS = 1 << 21
_BLOCK_ROWS = 2  # rows of merge blocks that are split at a time, so that they fit into the cache of a core


def smart_resize(
    height: int,
    width: int,
    *,
    multiple: int,
    min_pixels: int,
    max_pixels: int,
    num_frames: int = 1,
    compared_frames: int = 1,
) -> tuple[int, int]:
    """Compute the size nearest to the original within the pixel budget; returns (height, width) in pixels.

    Args:
        height, width: Size of the original in pixels.
        multiple: Both results are multiples of this (patch size times merge size).
        min_pixels, max_pixels: Inclusive budget for height times width, times the number of frames.
        num_frames: Frames that share the budget.
        compared_frames: The same as a multiple of a temporal patch, for the comparison with the budget.

    Raises:
        SampleError: The aspect ratio is over 200.
    """
    if min(height, width) < 1 or max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise SampleError(f"the aspect ratio of {height}x{width} pixels is over {MAX_ASPECT_RATIO}")
    new_height = round(height / multiple) * multiple
    new_width = round(width / multiple) * multiple
    if compared_frames * new_height * new_width > max_pixels:
        shrink = math.sqrt((num_frames * height * width) / max_pixels)
        new_height = max(multiple, math.floor(height / shrink / multiple) * multiple)
        new_width = max(multiple, math.floor(width / shrink / multiple) * multiple)
    elif compared_frames * new_height * new_width < min_pixels:
        grow = math.sqrt(min_pixels / (num_frames * height * width))
        new_height = math.ceil(height * grow / multiple) * multiple
        new_width = math.ceil(width * grow / multiple) * multiple
    return new_height, new_width


def count_patches(
    heights: NDArray[Any],
    widths: NDArray[Any],
    *,
    patch_size: int,
    multiple: int,
    min_pixels: NDArray[Any] | int,
    max_pixels: NDArray[Any] | int,
) -> NDArray[np.int64]:
    """Vectorized patch count with the arithmetic of `smart_resize`; -1 where `smart_resize` would raise.

    Args:
        heights, widths: [num_images], sizes of the originals in pixels.
        patch_size: Side of a patch in pixels.
        multiple: As in `smart_resize`.
        min_pixels, max_pixels: A scalar or [num_images].
    """
    height, width = heights.astype(np.float64), widths.astype(np.float64)
    m = multiple
    refused = np.minimum(height, width) < 1
    refused |= np.maximum(height, width) > MAX_ASPECT_RATIO * np.minimum(height, width)
    area = np.where(refused, 1.0, height * width)
    new_height, new_width = np.rint(height / m) * m, np.rint(width / m) * m
    too_big = new_height * new_width > max_pixels
    too_small = ~too_big & (new_height * new_width < min_pixels)
    shrink, grow = np.sqrt(area / max_pixels), np.sqrt(min_pixels / area)
    new_height = np.where(too_big, np.maximum(m, np.floor(height / shrink / m) * m), new_height)
    new_width = np.where(too_big, np.maximum(m, np.floor(width / shrink / m) * m), new_width)
    new_height = np.where(too_small, np.ceil(height * grow / m) * m, new_height)
    new_width = np.where(too_small, np.ceil(width * grow / m) * m, new_width)
    patches = (new_height * new_width).astype(np.int64) // patch_size**2
    return np.where(refused, -1, patches)


def read_size(content: bytes, *, decode_limit: int) -> tuple[int, int]:
    """Read (height, width) as displayed, with EXIF orientation applied, from the header.

    Raises:
        SampleError: The format is not supported, or the image is larger than `decode_limit` allows.
    """
    image = open_image(content, decode_limit)
    return (image.width, image.height) if orientation(image, content) >= 5 else (image.height, image.width)


def decode(
    content: bytes,
    *,
    decode_limit: int,
    padded: bool = False,
    scratch: Scratch | None = None,
    at_least: tuple[int, int] | None = None,
) -> NDArray[np.uint8]:
    """Decode an image to upright 8-bit RGB [H, W, 3]; transparent images are composited on white.

    Only the first frame of an animation is decoded.

    Args:
        content: The encoded image.
        decode_limit: Limit in pixels.
        padded: Allow a JPEG to be [H, W, 4] with an undefined last channel, which makes later steps faster.
        scratch: Buffers in which the image may be; they are overwritten by the next image.
        at_least: As in `opened`; the result may then have a fraction of the size.

    Raises:
        SampleError: The image is damaged, its format is not supported, or it is larger than `decode_limit` allows.
    """
    with opened(content, decode_limit=decode_limit, padded=padded, scratch=scratch, at_least=at_least) as image:
        return image.rows(0, image.height)


def to_patches(
    source: NDArray[np.uint8] | Image.Image | DecodedImage, config: ImageConfig, buffer: PatchBuffer | None = None
) -> tuple[NDArray[np.uint8], tuple[int, int, int]]:
    """Resize an image to its pixel budget and split it into patches.

    Args:
        source: [H, W, 3], [H, W, 4] whose last channel is ignored, a Pillow image in RGB, or a DecodedImage.
        config: Pixel budget and patch size.
        buffer: The patches are appended to it; a new buffer if None.

    Returns:
        Patches [P, patch_dim] in merge-block order, values of a patch ordered (channel, row, column), and the grid
        (time, height, width) in patches.
    """
    image = source if isinstance(source, DecodedImage) else DecodedImage(source)
    height, width = smart_resize(
        *image.original,
        multiple=config.multiple,
        min_pixels=config.min_pixels,
        max_pixels=config.max_pixels,
    )
    rows, columns = height // config.patch_size, width // config.patch_size
    buffer = buffer or PatchBuffer(rows * columns, config.patch_dim)
    if image.height * image.width <= MAX_WHOLE_PIXELS:
        resized = resize(image.rows(0, image.height), height, width, buffer.scratch)
    else:
        resized = resize_in_strips(image, height, width)
    if resized.shape[2] == 4 and resized.flags.c_contiguous:
        patches = _cut_padded(resized, config, buffer)
    else:
        patches = buffer.take(rows * columns)
        patches[:] = cut_patches(resized[None], config)
    return patches, (1, rows, columns)


def resize(pixels: NDArray[np.uint8], height: int, width: int, scratch: Scratch | None = None) -> NDArray[np.uint8]:
    """Resize [H, W, C] to [height, width, C], bicubic with antialiasing, in uint8.

    torch takes an eighth of the time of Pillow if the memory format is channels-last; the fast processor of
    transformers calls the same function. Pillow rounds differently, by 0.2 levels on average.

    Args:
        pixels: The image.
        height, width: New size in pixels.
        scratch: Buffers in which the result may be; they are overwritten by the next image.
    """
    if (height, width) == pixels.shape[:2]:
        return pixels
    import torch  # here, because indexing uses this module without torch

    image = torch.from_numpy(pixels)[None].permute(0, 3, 1, 2)
    if scratch is None:
        resized = torch.nn.functional.interpolate(image, (height, width), mode="bicubic", antialias=True)
        return resized[0].permute(1, 2, 0).numpy()
    channels = pixels.shape[2]
    out = scratch.take("resized", height * width * channels).reshape(height, width, channels)
    into = torch.from_numpy(out)[None].permute(0, 3, 1, 2)
    # The kernel of interpolate.
    torch.ops.aten._upsample_bicubic2d_aa.out(image, (height, width), False, None, None, out=into)
    return out


def resize_in_strips(
    image: DecodedImage, height: int, width: int, strip_pixels: int = STRIP_PIXELS
) -> NDArray[np.uint8]:
    """The same result as `resize`, computed in strips, so that the whole image is never converted to RGB at once.

    A resize is separable: the horizontal pass needs only one row at a time, the vertical pass runs on its result.
    """
    narrow: NDArray[np.uint8] | None = None
    step = max(1, strip_pixels // image.width)
    for start in range(0, image.height, step):
        strip = image.rows(start, min(start + step, image.height))
        if narrow is None:
            narrow = np.empty((image.height, width, strip.shape[2]), np.uint8)
        narrow[start : start + step] = resize(strip, len(strip), width)
    assert narrow is not None
    return resize(narrow, height, width)


def cut_patches(frames: NDArray[np.uint8], config: ImageConfig) -> NDArray[np.uint8]:
    """Split the frames of one temporal patch, [T, H, W, 3 or more] -> [P, 3 * T * patch_size**2].

    Patches are in merge-block order, values of a patch in the order (channel, time, row, column).
    """
    side, merge = config.patch_size, config.spatial_merge_size
    times, height, width, _ = frames.shape
    rows, columns = height // side, width // side
    # Two copies are faster than one that moves single bytes: first separate the channels, then move rows of patches.
    planes = np.ascontiguousarray(frames.transpose(3, 0, 1, 2)[:3])
    lines = planes.view(np.dtype((np.void, side)))
    lines = lines.reshape(3, times, rows // merge, merge, side, columns // merge, merge)
    cut = np.ascontiguousarray(lines.transpose(2, 5, 3, 6, 0, 1, 4))
    return cut.view(np.uint8).reshape(rows * columns, times * config.patch_dim)


def _cut_padded(pixels: NDArray[np.uint8], config: ImageConfig, buffer: PatchBuffer) -> NDArray[np.uint8]:
    """`cut_patches` for one image [H, W, 4], into a buffer: move whole pixels to their patches, then split channels.

    A few rows of blocks are processed at a time, so that they stay in the cache between the two steps.
    """
    side, merge = config.patch_size, config.spatial_merge_size
    height, width, _ = pixels.shape
    rows, columns = height // side, width // side
    block_rows = rows // merge
    lines = pixels.reshape(height, 4 * width).view(np.dtype((np.void, 4 * side)))
    lines = lines.reshape(block_rows, merge, side, columns // merge, merge).transpose(0, 3, 1, 4, 2)
    patches = buffer.take(rows * columns)
    channels = patches.reshape(block_rows, merge * columns, 3, side * side)
    for start in range(0, block_rows, _BLOCK_ROWS):
        some = lines[start : start + _BLOCK_ROWS]
        moved = buffer.scratch.take("cut", some.size * 4 * side)
        np.copyto(moved.view(lines.dtype).reshape(some.shape), some)
        values = moved.view("<u4").reshape(len(some), merge * columns, side * side)
        for channel in range(3):  # the cast keeps the lowest byte, which is the first of the four channels
            np.copyto(channels[start : start + _BLOCK_ROWS, :, channel], values, casting="unsafe")
            values >>= 8
    return patches
