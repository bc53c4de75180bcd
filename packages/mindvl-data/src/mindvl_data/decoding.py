# SPDX-License-Identifier: Apache-2.0
"""Encoded image -> upright 8-bit RGB rows, in bounded memory.

Comes after image_files.py, used by images.py. JPEG goes through libjpeg-turbo, everything else and CMYK through Pillow.
The rules, the same for training, evaluation and search (docs/reference/data-format.md): the first frame counts; EXIF orientation
is applied; transparent parts lie on white; 16 bits are scaled to 8; color profiles are not applied.
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

DECODING_BYTES = 1 << 29  # memory that all images being decoded by a process may take; one alone may take more

_TURNS = {  # by EXIF orientation, for Pillow
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_TURNED_ROWS = 64  # rows turned at once: what a core's own cache holds
_TIFF_BITS, _TIFF_PHOTOMETRIC = 258, 262


class DecodedImage:
    """A decoded image that gives its upright rows as RGB.

    Args:
        pixels: [H, W, 3], [H, W, 4] with a last channel of no meaning, or a loaded Pillow image of any mode.
        turn: EXIF orientation that is still to be applied.
        scratch: Rows may be in its memory.
    """

    def __init__(self, pixels: NDArray[np.uint8] | Image.Image, turn: int = 1, scratch: Scratch | None = None) -> None:
        self._pixels, self._turn, self._scratch = pixels, turn, scratch or Scratch()
        raw = pixels.shape[:2] if isinstance(pixels, np.ndarray) else (pixels.height, pixels.width)
        self._raw_height, self._raw_width = raw
        self.height, self.width = raw if turn < 5 else raw[::-1]

    def rows(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Upright rows [stop - start, W, 3 or 4]; they may share the memory of the image.

        Raises:
            SampleError: The image is of a kind that has no 8-bit RGB.
        """
        if self._turn in (3, 4, 7, 8):  # the last raw row or column comes first
            start, stop = self.height - stop, self.height - start
        if isinstance(self._pixels, np.ndarray):
            raw = self._pixels[start:stop] if self._turn < 5 else self._pixels[:, start:stop]
            return raw if self._turn == 1 else self._turned(raw)
        box = (0, start, self._raw_width, stop) if self._turn < 5 else (start, 0, stop, self._raw_height)
        image = self._pixels if box == (0, 0, self._raw_width, self._raw_height) else self._pixels.crop(box)
        values = _to_rgb(image)
        if self._turn != 1:
            values = values.transpose(_TURNS[self._turn])
        return np.array(values)

    def _turned(self, raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
        height, width, channels = raw.shape
        shape = (height, width) if self._turn < 5 else (width, height)
        out = self._scratch.take("turned", raw.size).reshape(*shape, channels)
        source, target = raw, out
        if channels == 4:  # whole pixels move much faster than bytes
            source, target = raw.view("<u4"), out.view("<u4")
        if self._turn in (2, 3, 6, 7):  # the view of `target` in which raw rows and columns keep their order
            target = target[:, ::-1]
        if self._turn in (3, 4, 7, 8):
            target = target[::-1]
        if self._turn >= 5:
            target = target.swapaxes(0, 1)
        for row in range(0, height, _TURNED_ROWS):
            target[row : row + _TURNED_ROWS] = source[row : row + _TURNED_ROWS]
        return out


@contextmanager
def opened(
    content: bytes, *, decode_limit: int, padded: bool = False, scratch: Scratch | None = None
) -> Iterator[DecodedImage]:
    """The decoded image. Other threads wait where too much memory would be used at once, until the block ends.

    Args:
        decode_limit: Pixels; decoding may take five bytes for each of them.
        padded: A JPEG may come with a fourth channel of no meaning.
        scratch: The image may be in its memory.

    Raises:
        SampleError: The bytes are damaged, of another format, or would take more memory than the limit allows.
    """
    scratch = scratch or Scratch()
    size = _plain_jpeg_size(content, decode_limit) if is_jpeg(content) else None
    if size is not None:
        turn = jpeg_orientation(content, decode_limit)
        with _MEMORY.taken(int(size[2])):
            yield DecodedImage(_decode_jpeg(content, size, padded, scratch), turn, scratch)
        return
    image = open_image(content, decode_limit)
    with _MEMORY.taken(int(image.height * image.width * bytes_per_pixel(image, content))):
        try:
            image.load()
        except Exception as error:  # Pillow's decoders raise many kinds; each of them means a damaged file
            raise SampleError(f"image cannot be decoded: {error}") from error
        yield DecodedImage(image, orientation(image, content))


class _Budget:
    """Bytes that threads share; who asks for more than is left waits."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self.start_over()

    def start_over(self) -> None:
        """As nobody holds anything: a forked process has none of the threads that would give it back."""
        self._used = 0
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, num_bytes: int) -> Iterator[None]:
        """Hold so many bytes in the block; more than there are is granted when nobody else holds any."""
        with self._changed:
            self._changed.wait_for(lambda: not self._used or self._used + num_bytes <= self._num_bytes)
            self._used += num_bytes
        try:
            yield
        finally:
            with self._changed:
                self._used = max(0, self._used - num_bytes)  # 0 already in a fork made inside the block
                self._changed.notify_all()


_MEMORY = _Budget(DECODING_BYTES)
os.register_at_fork(after_in_child=_MEMORY.start_over)


def _plain_jpeg_size(content: bytes, decode_limit: int) -> tuple[int, int, float] | None:
    """(height, width, bytes to decode it) of a JPEG for libjpeg-turbo; None for CMYK, which Adobe inverts."""
    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(content)
    except ValueError as error:
        raise SampleError(f"image cannot be decoded: {error}") from error
    if colorspace in ("CMYK", "YCCK"):
        return None
    needed = 4.0 + read_jpeg_header(content).coefficient_bytes
    check_memory(height, width, needed, decode_limit)
    return height, width, height * width * needed


def _decode_jpeg(content: bytes, size: tuple[int, int, float], padded: bool, scratch: Scratch) -> NDArray[np.uint8]:
    try:
        if not padded:
            return simplejpeg.decode_jpeg(content, colorspace="RGB")
        buffer = scratch.take("decoded", 4 * size[0] * size[1])
        return simplejpeg.decode_jpeg(content, colorspace="RGBX", buffer=buffer)
    except ValueError as error:
        raise SampleError(f"image cannot be decoded: {error}") from error


def _to_rgb(image: Image.Image) -> Image.Image:
    """8-bit RGB, on white where transparent."""
    if image.mode in ("I", "F"):
        raise SampleError(f"image has 32 bits per value (mode {image.mode}), which no rule scales to 8. Convert it")
    try:
        if image.mode.startswith("I;16"):
            return _from_16_bits(image)
        if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
            layers = image.convert("RGBA")
            return Image.alpha_composite(Image.new("RGBA", layers.size, "white"), layers).convert("RGB")
        return image if image.mode == "RGB" else image.convert("RGB")
    except Exception as error:  # a palette or a color space that Pillow cannot convert
        raise SampleError(f"image of mode {image.mode} cannot be converted to RGB: {error}") from error


def _from_16_bits(image: Image.Image) -> Image.Image:
    """Gray of 16 bits or, in a TIFF, of 12: its highest 8 bits. Pillow would clip instead."""
    values: NDArray[Any] = np.asarray(image)
    tags: Any = getattr(image, "tag_v2", {})
    high = (values >> (tags.get(_TIFF_BITS, (16,))[0] - 8)).clip(0, 255).astype(np.uint8)
    if tags.get(_TIFF_PHOTOMETRIC) == 0:  # white is zero, which Pillow minds with 8 bits only
        high = 255 - high
    clear = image.info.get("transparency")
    if isinstance(clear, int):
        high[values == clear] = 255
    return Image.fromarray(high).convert("RGB")
