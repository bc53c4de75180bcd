# SPDX-License-Identifier: Apache-2.0
"""Encoded image -> upright 8-bit RGB rows, in bounded memory.

Comes after image_files.py, used by images.py. JPEG goes through libjpeg-turbo, everything else and CMYK through Pillow.
The rules are the same for training, evaluation and search (docs/reference/data-format.md): only the first frame is
used; EXIF orientation is applied; transparent images are composited on white; 16 bits are scaled to 8; color profiles
are not applied.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

from mindvl_data.errors import SampleError
from mindvl_data.image_files import (
    bytes_per_pixel,
    check_memory,
    is_jpeg,
    jpeg_orientation,
    open_image,
    orientation,
    read_jpeg_header,
)
from mindvl_data.patches import Scratch

DECODING_BYTES = 1 << 29  # memory for all images that a process decodes at a time; a single image may take more

_TRANSPOSE = {  # by EXIF orientation
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ROTATED_ROWS = 64  # rows that are rotated at a time, so that they fit into the cache of a core
_TIFF_BITS, _TIFF_PHOTOMETRIC = 258, 262


class DecodedImage:
    """A decoded image that returns rows of the upright image as RGB.

    Args:
        pixels: [H, W, 3], [H, W, 4] with an undefined last channel, or a loaded Pillow image of any mode.
        orientation: EXIF orientation to apply, 1 to 8.
        scratch: Buffers in which returned rows may be; they are overwritten by the next image.
        original: Height and width of the stored image if `pixels` were decoded at a fraction of its size.

    Attributes:
        height, width: Size of the rows that are returned.
        original: Height and width of the upright image before any reduction.
    """

    def __init__(
        self,
        pixels: NDArray[np.uint8] | Image.Image,
        orientation: int = 1,
        scratch: Scratch | None = None,
        original: tuple[int, int] | None = None,
    ) -> None:
        self._pixels, self._orientation, self._scratch = pixels, orientation, scratch or Scratch()
        raw = pixels.shape[:2] if isinstance(pixels, np.ndarray) else (pixels.height, pixels.width)
        self._raw_height, self._raw_width = raw
        self.height, self.width = raw if orientation < 5 else raw[::-1]
        stored = original or (self._raw_height, self._raw_width)
        self.original = stored if orientation < 5 else stored[::-1]

    def rows(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Rows of the upright image, [stop - start, W, 3 or 4]; they may share the memory of the image.

        Raises:
            SampleError: The mode of the image cannot be converted to 8-bit RGB.
        """
        if self._orientation in (3, 4, 7, 8):  # the last stored row or column comes first
            start, stop = self.height - stop, self.height - start
        if isinstance(self._pixels, np.ndarray):
            raw = self._pixels[start:stop] if self._orientation < 5 else self._pixels[:, start:stop]
            return raw if self._orientation == 1 else self._rotated(raw)
        box = (0, start, self._raw_width, stop) if self._orientation < 5 else (start, 0, stop, self._raw_height)
        image = self._pixels if box == (0, 0, self._raw_width, self._raw_height) else self._pixels.crop(box)
        values = _to_rgb(image)
        if self._orientation != 1:
            values = values.transpose(_TRANSPOSE[self._orientation])
        return np.array(values)

    def _rotated(self, raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
        height, width, channels = raw.shape
        shape = (height, width) if self._orientation < 5 else (width, height)
        out = self._scratch.take("rotated", raw.size).reshape(*shape, channels)
        source, target = raw, out
        if channels == 4:  # moving whole pixels is much faster than moving bytes
            source, target = raw.view("<u4"), out.view("<u4")
        if self._orientation in (2, 3, 6, 7):  # view `target` in the order of the stored rows and columns
            target = target[:, ::-1]
        if self._orientation in (3, 4, 7, 8):
            target = target[::-1]
        if self._orientation >= 5:
            target = target.swapaxes(0, 1)
        for row in range(0, height, _ROTATED_ROWS):
            target[row : row + _ROTATED_ROWS] = source[row : row + _ROTATED_ROWS]
        return out


@contextmanager
def opened(
    content: bytes,
    *,
    decode_limit: int,
    padded: bool = False,
    scratch: Scratch | None = None,
    at_least: tuple[int, int] | None = None,
) -> Iterator[DecodedImage]:
    """Decode an image; blocks while the images that other threads hold take too much memory.

    Args:
        content: The encoded image.
        decode_limit: Limit in pixels; decoding may take five bytes for each of them.
        padded: Allow a JPEG to have an undefined fourth channel, which is faster.
        scratch: Buffers in which the image may be; they are overwritten by the next image.
        at_least: Decode a JPEG at the smallest fraction of its size, at most half, that has this height and width
            upright, as ImageConfig.jpeg_scaling describes; None: at its size.

    Raises:
        SampleError: The image is damaged, its format is not supported, or it needs more memory than the limit allows.
    """
    scratch = scratch or Scratch()
    size = _plain_jpeg_size(content, decode_limit) if is_jpeg(content) else None
    if size is not None:
        exif = jpeg_orientation(content, decode_limit)
        least = at_least if at_least is None or exif < 5 else at_least[::-1]
        with _MEMORY.reserved(int(size[2])):
            yield DecodedImage(_decode_jpeg(content, size, padded, scratch, least), exif, scratch, size[:2])
        return
    image = open_image(content, decode_limit)
    with _MEMORY.reserved(int(image.height * image.width * bytes_per_pixel(image, content))):
        try:
            image.load()
        except Exception as error:  # Pillow's decoders raise errors of many types, all for damaged files
            raise SampleError(f"image cannot be decoded: {error}") from error
        yield DecodedImage(image, orientation(image, content))


class _MemoryBudget:
    """Limits the memory that threads hold at the same time."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self.reset()

    def reset(self) -> None:
        """Release everything: a forked process does not have the threads that hold memory."""
        self._used = 0
        self._changed = threading.Condition()

    @contextmanager
    def reserved(self, num_bytes: int) -> Iterator[None]:
        """Hold `num_bytes` in the block. A request over the limit waits until no other thread holds memory."""
        with self._changed:
            self._changed.wait_for(lambda: not self._used or self._used + num_bytes <= self._num_bytes)
            self._used += num_bytes
        try:
            yield
        finally:
            with self._changed:
                self._used = max(0, self._used - num_bytes)  # already 0 in a process forked inside the block
                self._changed.notify_all()


_MEMORY = _MemoryBudget(DECODING_BYTES)
os.register_at_fork(after_in_child=_MEMORY.reset)


def _plain_jpeg_size(content: bytes, decode_limit: int) -> tuple[int, int, float] | None:
    """(height, width, decoding memory in bytes) of a JPEG; None for CMYK, which Pillow has to decode."""
    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(content)
    except ValueError as error:
        raise SampleError(f"image cannot be decoded: {error}") from error
    if colorspace in ("CMYK", "YCCK"):
        return None
    needed = 4.0 + read_jpeg_header(content).coefficient_bytes
    check_memory(height, width, needed, decode_limit)
    return height, width, height * width * needed


def _decode_jpeg(
    content: bytes,
    size: tuple[int, int, float],
    padded: bool,
    scratch: Scratch,
    at_least: tuple[int, int] | None,
) -> NDArray[np.uint8]:
    scaling = {} if at_least is None else {"min_height": at_least[0], "min_width": at_least[1], "min_factor": 2}
    try:
        if not padded:
            return simplejpeg.decode_jpeg(content, colorspace="RGB", **scaling)
        buffer = scratch.take("decoded", 4 * size[0] * size[1])
        return simplejpeg.decode_jpeg(content, colorspace="RGBX", buffer=buffer, **scaling)
    except ValueError as error:
        raise SampleError(f"image cannot be decoded: {error}") from error


def _to_rgb(image: Image.Image) -> Image.Image:
    """Convert to 8-bit RGB; transparent images are composited on white."""
    if image.mode in ("I", "F"):
        raise SampleError(f"image of mode {image.mode} has 32 bits per channel, expected 8 or 16. Convert it")
    try:
        if image.mode.startswith("I;16"):
            return _from_16_bits(image)
        if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
            layers = image.convert("RGBA")
            return Image.alpha_composite(Image.new("RGBA", layers.size, "white"), layers).convert("RGB")
        return image if image.mode == "RGB" else image.convert("RGB")
    except Exception as error:  # Pillow cannot convert some palettes and color spaces
        raise SampleError(f"image of mode {image.mode} cannot be converted to RGB: {error}") from error


def _from_16_bits(image: Image.Image) -> Image.Image:
    """The 8 highest bits of a gray image of 16 bits or, in a TIFF, of 12. Pillow would clip the values."""
    values: NDArray[Any] = np.asarray(image)
    tags: Any = getattr(image, "tag_v2", {})
    high = (values >> (tags.get(_TIFF_BITS, (16,))[0] - 8)).clip(0, 255).astype(np.uint8)
    if tags.get(_TIFF_PHOTOMETRIC) == 0:  # WhiteIsZero, which Pillow handles only for 8 bits
        high = 255 - high
    clear = image.info.get("transparency")
    if isinstance(clear, int):
        high[values == clear] = 255
    return Image.fromarray(high).convert("RGB")
