# SPDX-License-Identifier: Apache-2.0
"""Encoded image -> what its header says: format, size, orientation, and the memory that decoding takes.

Comes after the shards, before images.py, which decodes. Nothing is decoded here, so an image that would take too much
memory is refused at the cost of its header.
"""

import io
from dataclasses import dataclass
from typing import Any

from PIL import Image

from mindvl_data.errors import SampleError

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
BYTES_OF_LIMIT = 5  # memory that decoding may take for each pixel of `decode_limit`

_ORIENTATION_TAG = 0x0112
_JPEG_START = b"\xff\xd8\xff"
_BARE_MARKERS = (0x01, *range(0xD0, 0xD9))  # JPEG markers without a length
_START_OF_SCAN = 0xDA
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # markers of frame headers; the others of them are tables
_PROGRESSIVE = (0xC2, 0xC6, 0xCA, 0xCE)
# Bytes per pixel at the peak, measured on blank images of 8,900 x 8,900 pixels. Pillow's own image takes four; WebP's
# decoder keeps two canvases more, AVIF's the planes in 16 bits, TIFF's a strip that may be the whole image.
_BYTES_PER_PIXEL = {"WEBP": 15.5, "AVIF": 15.5, "TIFF": 12.0}
_ORIENTATION_MARKS = (b"eXIf", b"EXIF", b"Raw profile type exif", b"tiff:Orientation")
_JPEG_ORIENTATION_MARKS = (b"Exif\0\0", b"tiff:Orientation")


@dataclass(frozen=True)
class JpegHeader:
    """What stands before the compressed data of a JPEG."""

    first_scan: int  # byte at which the first scan begins; the length of the file where there is none
    coefficient_bytes: float  # per pixel, kept for the whole image until its last scan; 0 where one scan holds it all


def is_jpeg(content: bytes) -> bool:
    """Whether the bytes begin as a JPEG does."""
    return content[:3] == _JPEG_START


def read_jpeg_header(content: bytes) -> JpegHeader:
    """Walk over the segments of a JPEG up to its first scan."""
    place, samples, components, is_progressive = 2, 0.0, 0, False
    while place + 4 <= len(content) and content[place] == 0xFF:
        marker = content[place + 1]
        if marker == 0xFF:
            place += 1  # fill byte
            continue
        if marker in _BARE_MARKERS:
            place += 2
            continue
        if marker == _START_OF_SCAN:
            in_scan = content[place + 4] if place + 4 < len(content) else 0
            return JpegHeader(place, 2 * samples if is_progressive or in_scan < components else 0.0)
        if marker in _FRAMES:
            is_progressive = marker in _PROGRESSIVE
            samples, components = _samples_per_pixel(content[place + 9 :])
        place += 2 + int.from_bytes(content[place + 2 : place + 4], "big")
    return JpegHeader(len(content), 2 * samples)


def open_image(content: bytes, decode_limit: int) -> Image.Image:
    """The image, opened and not decoded.

    Args:
        decode_limit: Pixels; decoding may take five bytes for each of them.

    Raises:
        SampleError: Not an image of an allowed format, or decoding it would take more memory than the limit allows.
    """
    try:
        image = Image.open(io.BytesIO(content), formats=FORMATS)
    except Exception as error:  # Pillow raises many kinds, its own bomb error among them
        why = str(error).replace(" <_io.BytesIO object", " <bytes")
        raise SampleError(f"image cannot be opened: {why}") from error
    check_memory(image.height, image.width, bytes_per_pixel(image, content), decode_limit)
    return image


def bytes_per_pixel(image: Image.Image, content: bytes) -> float:
    """Memory that decoding takes at its peak, for one pixel of the image."""
    needed = _BYTES_PER_PIXEL.get(image.format or "", 4.0)
    return needed + read_jpeg_header(content).coefficient_bytes if is_jpeg(content) else needed


def check_memory(height: int, width: int, needed: float, decode_limit: int) -> None:
    """Refuse an image that takes more memory than the limit allows.

    Args:
        needed: Bytes per pixel.

    Raises:
        SampleError: It has more pixels than the limit, or needs more than five bytes for each of them.
    """
    if height * width > decode_limit:
        raise SampleError(
            f"image of {height}x{width} pixels is larger than the decode limit of {decode_limit} pixels. "
            "Make it smaller, or raise decode_limit"
        )
    if height * width * needed > decode_limit * BYTES_OF_LIMIT:
        raise SampleError(
            f"image of {height}x{width} pixels takes {height * width * needed / 1e6:.0f} MB to decode in its format, "
            f"and the decode limit of {decode_limit} pixels allows {decode_limit * BYTES_OF_LIMIT / 1e6:.0f} MB. "
            "Make it smaller, or raise decode_limit"
        )


def orientation(image: Image.Image, content: bytes) -> int:
    """The EXIF orientation, 1 to 8, that is still to be applied to the decoded pixels.

    Where EXIF has none, the one in XMP counts, as in Pillow. TIFF's is applied by Pillow while it decodes, and its
    size is the one as shown from the beginning.

    Raises:
        SampleError: EXIF is there and damaged.
    """
    if image.format == "TIFF" or not _may_be_turned(content):
        return 1
    try:
        value: Any = image.getexif().get(_ORIENTATION_TAG, 1)
    except Exception as error:  # damaged EXIF raises many kinds
        raise SampleError(f"orientation of the image cannot be read: {error}") from error
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def jpeg_orientation(content: bytes, decode_limit: int) -> int:
    """The same of a JPEG, from its bytes."""
    return orientation(open_image(content, decode_limit), content) if _may_be_turned(content) else 1


def _may_be_turned(content: bytes) -> bool:
    """Far quicker than parsing, which decodes a PNG whose EXIF stands at its end; a match by chance costs time only."""
    if is_jpeg(content):
        end = read_jpeg_header(content).first_scan
        return any(content.find(mark, 0, end) >= 0 for mark in _JPEG_ORIENTATION_MARKS)
    if content[4:8] == b"ftyp":
        return True  # AVIF may be turned by its own boxes
    return any(content.find(mark) >= 0 for mark in _ORIENTATION_MARKS)


def _samples_per_pixel(table: bytes) -> tuple[float, int]:
    """Samples per pixel of all components together, and how many components there are.

    Args:
        table: A frame header from its number of components on; three bytes for each component follow.
    """
    count = min(table[0], (len(table) - 1) // 3) if table else 0
    factors = [(table[2 + 3 * n] >> 4, table[2 + 3 * n] & 15) for n in range(count)]
    if not factors or min(min(pair) for pair in factors) < 1:
        return 4.0, 4  # damaged: count the most it could be
    largest = max(h for h, _ in factors) * max(v for _, v in factors)
    return sum(h * v for h, v in factors) / largest, count
