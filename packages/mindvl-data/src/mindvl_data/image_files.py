# SPDX-License-Identifier: Apache-2.0
"""Read the header of an encoded image: format, size, orientation, and the memory that decoding takes.

Comes after the shards, before images.py, which decodes. Nothing is decoded here, so an image that would take too much
memory is refused after its header has been read.
"""

import io
from dataclasses import dataclass
from typing import Any

from PIL import Image

from mindvl_data.errors import SampleError

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
BYTES_PER_LIMIT_PIXEL = 5  # memory that decoding may take, for each pixel of `decode_limit`

_ORIENTATION_TAG = 0x0112
_JPEG_START = b"\xff\xd8\xff"
_BARE_MARKERS = (0x01, *range(0xD0, 0xD9))  # JPEG markers without a length
_START_OF_SCAN = 0xDA
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # markers of frame headers; the three others are tables
_PROGRESSIVE = (0xC2, 0xC6, 0xCA, 0xCE)
# Peak bytes per pixel, measured on blank images of 8,900 x 8,900 pixels. Pillow's image takes four; the WebP decoder
# keeps two more canvases, the AVIF decoder 16-bit planes, the TIFF decoder a strip, possibly the whole image.
_BYTES_PER_PIXEL = {"WEBP": 15.5, "AVIF": 15.5, "TIFF": 12.0}
_ORIENTATION_MARKS = (b"eXIf", b"EXIF", b"Raw profile type exif", b"tiff:Orientation")
_JPEG_ORIENTATION_MARKS = (b"Exif\0\0", b"tiff:Orientation")


@dataclass(frozen=True)
class JpegHeader:
    """The part of a JPEG before its compressed data."""

    first_scan: int  # offset of the first scan; the length of the file if there is none
    coefficient_bytes: float  # per pixel, kept by the decoder until the last scan; 0 if there is only one scan


def is_jpeg(content: bytes) -> bool:
    """Whether the bytes begin with the JPEG signature."""
    return content[:3] == _JPEG_START


def read_jpeg_header(content: bytes) -> JpegHeader:
    """Parse the segments of a JPEG up to its first scan."""
    offset, samples, components, is_progressive = 2, 0.0, 0, False
    while offset + 4 <= len(content) and content[offset] == 0xFF:
        marker = content[offset + 1]
        if marker == 0xFF:
            offset += 1  # fill byte
            continue
        if marker in _BARE_MARKERS:
            offset += 2
            continue
        if marker == _START_OF_SCAN:
            in_scan = content[offset + 4] if offset + 4 < len(content) else 0
            return JpegHeader(offset, 2 * samples if is_progressive or in_scan < components else 0.0)
        if marker in _FRAMES:
            is_progressive = marker in _PROGRESSIVE
            samples, components = _samples_per_pixel(content[offset + 9 :])
        offset += 2 + int.from_bytes(content[offset + 2 : offset + 4], "big")
    return JpegHeader(len(content), 2 * samples)


def open_image(content: bytes, decode_limit: int) -> Image.Image:
    """Open an image with Pillow, without decoding it.

    Args:
        content: The encoded image.
        decode_limit: Limit in pixels; decoding may take five bytes for each of them.

    Raises:
        SampleError: The format is not supported, or decoding would take more memory than the limit allows.
    """
    try:
        image = Image.open(io.BytesIO(content), formats=FORMATS)
    except Exception as error:  # Pillow raises errors of many types, including DecompressionBombError
        why = str(error).replace(" <_io.BytesIO object", " <bytes")
        raise SampleError(f"image cannot be opened: {why}") from error
    check_memory(image.height, image.width, bytes_per_pixel(image, content), decode_limit)
    return image


def bytes_per_pixel(image: Image.Image, content: bytes) -> float:
    """Peak memory of decoding, in bytes per pixel."""
    needed = _BYTES_PER_PIXEL.get(image.format or "", 4.0)
    return needed + read_jpeg_header(content).coefficient_bytes if is_jpeg(content) else needed


def check_memory(height: int, width: int, needed: float, decode_limit: int) -> None:
    """Refuse an image whose decoding would take more memory than the limit allows.

    Args:
        height, width: Size of the image in pixels.
        needed: Bytes per pixel.
        decode_limit: Limit in pixels.

    Raises:
        SampleError: The image has more pixels than the limit, or needs more than five bytes per pixel of the limit.
    """
    if height * width > decode_limit:
        raise SampleError(
            f"image of {height}x{width} pixels is larger than the decode limit of {decode_limit} pixels. "
            "Resize it, or increase decode_limit"
        )
    if height * width * needed > decode_limit * BYTES_PER_LIMIT_PIXEL:
        raise SampleError(
            f"image of {height}x{width} pixels takes {height * width * needed / 1e6:.0f} MB to decode, "
            f"the decode limit of {decode_limit} pixels allows {decode_limit * BYTES_PER_LIMIT_PIXEL / 1e6:.0f} MB. "
            "Resize it, or increase decode_limit"
        )


def orientation(image: Image.Image, content: bytes) -> int:
    """The EXIF orientation, 1 to 8, to apply to the decoded pixels.

    If EXIF has none, the one in XMP is used, as in Pillow. For TIFF it is 1, because Pillow applies the orientation
    while it decodes and reports the size as displayed.

    Raises:
        SampleError: The EXIF data are damaged.
    """
    if image.format == "TIFF" or not _may_have_orientation(content):
        return 1
    try:
        value: Any = image.getexif().get(_ORIENTATION_TAG, 1)
    except Exception as error:  # damaged EXIF data raise errors of many types
        raise SampleError(f"the orientation of the image cannot be read: {error}") from error
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def jpeg_orientation(content: bytes, decode_limit: int) -> int:
    """The EXIF orientation of a JPEG."""
    return orientation(open_image(content, decode_limit), content) if _may_have_orientation(content) else 1


def _may_have_orientation(content: bytes) -> bool:
    """A fast test before parsing, which would decode a PNG with EXIF at its end; false positives cost only time."""
    if is_jpeg(content):
        end = read_jpeg_header(content).first_scan
        return any(content.find(mark, 0, end) >= 0 for mark in _JPEG_ORIENTATION_MARKS)
    if content[4:8] == b"ftyp":
        return True  # AVIF has its own boxes for rotation
    return any(content.find(mark) >= 0 for mark in _ORIENTATION_MARKS)


def _samples_per_pixel(table: bytes) -> tuple[float, int]:
    """The samples per pixel of all components together, and the number of components.

    Args:
        table: A frame header from the number of components on; three bytes per component follow.
    """
    count = min(table[0], (len(table) - 1) // 3) if table else 0
    factors = [(table[2 + 3 * n] >> 4, table[2 + 3 * n] & 15) for n in range(count)]
    if not factors or min(min(pair) for pair in factors) < 1:
        return 4.0, 4  # damaged: assume the maximum
    largest = max(h for h, _ in factors) * max(v for _, v in factors)
    return sum(h * v for h, v in factors) / largest, count
