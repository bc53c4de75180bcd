# SPDX-License-Identifier: Apache-2.0
"""Encoded image -> uint8 patches: decode, resize to the pixel budget, cut.

Comes after the shards, before collate; training, evaluation and search all decode here. Sizes, resize and patch order
are those of transformers' Qwen2-VL image processor (Qwen2-VL, arXiv 2409.12191); normalising and the temporal copy are
left to the device.
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
from mindvl_data.patches import PatchRoom, Scratch

MAX_ASPECT_RATIO = 200
WHOLE_PIXELS = 1 << 24  # images of more pixels are resized in strips
STRIP_PIXELS = 1 << 21
_BLOCK_ROWS = 2  # lines of merge blocks cut at once: about as much as a core's own cache holds


def smart_resize(height: int, width: int, *, multiple: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Choose the size nearest to the original that fits the pixel budget; returns (height, width) in pixels.

    Args:
        multiple: Both results are multiples of this (patch size times merge size).
        min_pixels, max_pixels: Inclusive budget for height times width.

    Raises:
        SampleError: One side is more than 200 times the other.
    """
    if min(height, width) < 1 or max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise SampleError(f"the aspect ratio of {height}x{width} pixels is over {MAX_ASPECT_RATIO}")
    new_height = round(height / multiple) * multiple
    new_width = round(width / multiple) * multiple
    if new_height * new_width > max_pixels:
        shrink = math.sqrt((height * width) / max_pixels)
        new_height = max(multiple, math.floor(height / shrink / multiple) * multiple)
        new_width = max(multiple, math.floor(width / shrink / multiple) * multiple)
    elif new_height * new_width < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
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
    """Patches of many images at once, by the arithmetic of `smart_resize`; -1 where it would refuse the image.

    Args:
        heights, widths: [num_images], pixels of the originals.
        min_pixels, max_pixels: One for all, or [num_images].
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
    """(height, width) as shown, EXIF orientation applied, from the header alone.

    Raises:
        SampleError: Not an image of an allowed format, or larger than `decode_limit` allows.
    """
    image = open_image(content, decode_limit)
    return (image.width, image.height) if orientation(image, content) >= 5 else (image.height, image.width)


def decode(
    content: bytes, *, decode_limit: int, padded: bool = False, scratch: Scratch | None = None
) -> NDArray[np.uint8]:
    """The image as 8-bit RGB [H, W, 3], upright, on white where transparent; the first frame of an animated one.

    Args:
        padded: A JPEG may come as [H, W, 4] with a last channel of no meaning, which makes resize and cut faster.
        scratch: The image may be in its memory.

    Raises:
        SampleError: The bytes are damaged, of another format, or claim more than `decode_limit` allows.
    """
    with opened(content, decode_limit=decode_limit, padded=padded, scratch=scratch) as image:
        return image.rows(0, image.height)


def to_patches(
    source: NDArray[np.uint8] | Image.Image | DecodedImage, config: ImageConfig, room: PatchRoom | None = None
) -> tuple[NDArray[np.uint8], tuple[int, int, int]]:
    """Resize and cut.

    Args:
        source: [H, W, 3], or [H, W, 4] of which the last channel is left out, a Pillow image in RGB, or what `opened`
            gives.
        room: Where the patches go; else memory of their own.

    Returns:
        Patches [P, patch_dim] in merge-block order, values of a patch ordered (channel, row, column), and the grid
        (time, height, width) in patches.
    """
    image = source if isinstance(source, DecodedImage) else DecodedImage(source)
    height, width = smart_resize(
        image.height,
        image.width,
        multiple=config.multiple,
        min_pixels=config.min_pixels,
        max_pixels=config.max_pixels,
    )
    rows, columns = height // config.patch_size, width // config.patch_size
    room = room or PatchRoom(rows * columns, config.patch_dim)
    if image.height * image.width <= WHOLE_PIXELS:
        resized = resize(image.rows(0, image.height), height, width, room.scratch)
    else:
        resized = resize_in_strips(image, height, width)
    if resized.shape[2] == 4 and resized.flags.c_contiguous:
        patches = _cut_padded(resized, config, room)
    else:
        patches = room.take(rows * columns)
        patches[:] = cut_patches(resized[None], config)
    return patches, (1, rows, columns)


def resize(pixels: NDArray[np.uint8], height: int, width: int, scratch: Scratch | None = None) -> NDArray[np.uint8]:
    """[H, W, C] -> [height, width, C], bicubic with antialias, in whole numbers.

    torch does it in an eighth of Pillow's time, as long as it sees the channels last; it is what transformers' faster
    processor calls. Pillow rounds otherwise: by a fifth of a level on average.

    Args:
        scratch: The result may be in its memory.
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
    torch.ops.aten._upsample_bicubic2d_aa.out(image, (height, width), False, None, None, out=into)  # interpolate's
    return out


def resize_in_strips(
    image: DecodedImage, height: int, width: int, strip_pixels: int = STRIP_PIXELS
) -> NDArray[np.uint8]:
    """The same pixels as `resize` gives, from strips of the image, so that it is never converted as a whole.

    A resize is two passes, along lines and then across them; the first one needs one line at a time.
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
    """Cut frames that share one temporal patch, [T, H, W, 3 or more] -> [P, 3 * T * patch_size**2].

    Patches stand in merge-block order; values of a patch are ordered (channel, time, row, column).
    """
    side, merge = config.patch_size, config.spatial_merge_size
    times, height, width, _ = frames.shape
    rows, columns = height // side, width // side
    # two plain copies are faster than one that steps through single bytes: channels apart, then whole lines of patches
    planes = np.ascontiguousarray(frames.transpose(3, 0, 1, 2)[:3])
    lines = planes.view(np.dtype((np.void, side)))
    lines = lines.reshape(3, times, rows // merge, merge, side, columns // merge, merge)
    cut = np.ascontiguousarray(lines.transpose(2, 5, 3, 6, 0, 1, 4))
    return cut.view(np.uint8).reshape(rows * columns, times * config.patch_dim)


def _cut_padded(pixels: NDArray[np.uint8], config: ImageConfig, room: PatchRoom) -> NDArray[np.uint8]:
    """The same for one image [H, W, 4], into a room: whole pixels are moved to their patches, then channels apart.

    A few block rows at a time, so that the second step finds its pixels in the cache.
    """
    side, merge = config.patch_size, config.spatial_merge_size
    height, width, _ = pixels.shape
    rows, columns = height // side, width // side
    block_rows = rows // merge
    lines = pixels.reshape(height, 4 * width).view(np.dtype((np.void, 4 * side)))
    lines = lines.reshape(block_rows, merge, side, columns // merge, merge).transpose(0, 3, 1, 4, 2)
    patches = room.take(rows * columns)
    channels = patches.reshape(block_rows, merge * columns, 3, side * side)
    for start in range(0, block_rows, _BLOCK_ROWS):
        some = lines[start : start + _BLOCK_ROWS]
        moved = room.scratch.take("cut", some.size * 4 * side)
        np.copyto(moved.view(lines.dtype).reshape(some.shape), some)
        values = moved.view("<u4").reshape(len(some), merge * columns, side * side)
        for channel in range(3):  # a cast keeps the lowest byte, which is the first of four
            np.copyto(channels[start : start + _BLOCK_ROWS, :, channel], values, casting="unsafe")
            values >>= 8
    return patches
