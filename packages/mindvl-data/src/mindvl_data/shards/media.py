# SPDX-License-Identifier: Apache-2.0
"""Check one image or video of a shard: its format, size, and whether the file is complete.

Used when shards are written and when they are indexed, so that written shards can always be indexed. By default JPEG,
PNG, WebP and mp4 are not decoded: sizes come from headers, and the end marker of each format shows whether the file is
truncated.
"""

import numpy as np

from mindvl_data.decoding import opened
from mindvl_data.errors import SampleError
from mindvl_data.image_files import read_jpeg_header
from mindvl_data.images import MAX_ASPECT_RATIO, read_size
from mindvl_data.types import MediaSize
from mindvl_data.video import CONTAINERS, VideoLayout, probe, used_frames, video_extension

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_END = b"\x00\x00\x00\x00IEND\xaeB`\x82"
_JPEG_END = b"\xff\xd9"
_TIFF_SIGNATURES = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_BMP_HEADER_SIZES = (12, 16, 40, 52, 56, 64, 108, 124)
_SEGMENT = b"\x18\x53\x80\x67"
_AVIF_BRANDS = (b"avif", b"avis")
_COMPLETE_IF_DECODED = ("gif", "bmp", "tiff", "avif")  # rare formats without an end marker
_KINDS = "JPEG, PNG, WebP, GIF, BMP, TIFF, AVIF, mp4, mov, mkv, webm or avi"


def media_extension(content: bytes) -> str | None:
    """The file extension for the format of the bytes, regardless of the file name; None for an unsupported format."""
    if content.startswith(b"\xff\xd8\xff"):
        return "jpg"
    if content.startswith(_PNG_SIGNATURE):
        return "png"
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "webp"
    if content[:6] in (b"GIF87a", b"GIF89a"):
        return "gif"
    if content[:4] in _TIFF_SIGNATURES:
        return "tiff"
    if content[:2] == b"BM" and int.from_bytes(content[14:18], "little") in _BMP_HEADER_SIZES:
        return "bmp"
    if content[4:8] == b"ftyp" and _brands(content) & {*_AVIF_BRANDS}:
        return "avif"
    return video_extension(content)


def check_media(content: bytes, *, decode_limit: int, decode_all: bool = False) -> MediaSize:
    """Check an image or video and return its size as displayed.

    Args:
        content: The encoded file.
        decode_limit: Limit in pixels; a larger image is refused before anything is decoded.
        decode_all: Decode every pixel, which also detects damage in the compressed data.

    Raises:
        SampleError: The file is damaged, truncated, of an unsupported format, or its aspect ratio is over 200.
    """
    extension = media_extension(content)
    if extension is None:
        raise SampleError(f"the format of a file of {len(content)} bytes is not {_KINDS}")
    if not _is_complete(content, extension):
        raise SampleError(f"{extension} of {len(content)} bytes is truncated: its end is missing")
    if extension in CONTAINERS:
        size = probe(content)
        if decode_all:
            every_frame = VideoLayout(
                frames=np.arange(size.frames), height=0, width=0, grid=(size.frames, 0, 0), seconds_per_grid=0.0
            )
            for _ in used_frames(content, size, every_frame):
                pass
    else:
        size = MediaSize(*read_size(content, decode_limit=decode_limit))
        if decode_all or extension in _COMPLETE_IF_DECODED:
            with opened(content, decode_limit=decode_limit) as image:
                image.rows(0, 1)
    if max(size.height, size.width) > MAX_ASPECT_RATIO * min(size.height, size.width):
        raise SampleError(f"the aspect ratio of {size.height}x{size.width} pixels is over {MAX_ASPECT_RATIO}")
    return size


def _is_complete(content: bytes, extension: str) -> bool:
    if extension == "jpg":
        # The end marker cannot occur in compressed data, but it can before them, in an embedded thumbnail.
        return content.rfind(_JPEG_END, read_jpeg_header(content).first_scan) >= 0
    if extension == "png":
        return content.rfind(_PNG_END) >= 0
    if extension in ("webp", "avi"):
        return len(content) >= 8 + int.from_bytes(content[4:8], "little")
    if extension in _COMPLETE_IF_DECODED:
        return True
    if extension in ("mkv", "webm"):
        return _segment_end(content) <= len(content)
    return _boxes_end(content) == len(content)


def _segment_end(content: bytes) -> int:
    """The end offset of the Segment of a Matroska file by its size; 0 if the writer did not know the size."""
    header, after = _vint(content, 4)
    start = after + header
    if content[start : start + 4] != _SEGMENT:
        return 0
    size, after = _vint(content, start + 4)
    is_unknown = size == (1 << 7 * (after - start - 4)) - 1
    return 0 if is_unknown else after + size


def _vint(content: bytes, offset: int) -> tuple[int, int]:
    """(value, end) of a Matroska integer of variable length; (0, offset) past the end."""
    if offset >= len(content) or not content[offset]:
        return 0, offset
    length = 9 - content[offset].bit_length()
    value = int.from_bytes(content[offset : offset + length], "big")
    return value & ((1 << 7 * length) - 1), offset + length


def _brands(content: bytes) -> set[bytes]:
    """The major brand and the compatible brands of an ISO base media file."""
    end = min(int.from_bytes(content[:4], "big"), len(content), 256)
    return {content[8:12], *(content[offset : offset + 4] for offset in range(16, end - 3, 4))}


def _boxes_end(content: bytes) -> int:
    """The end offset of the last box of an mp4 according to the box sizes; -1 if a size is invalid."""
    offset = 0
    while offset < len(content):
        length = int.from_bytes(content[offset : offset + 4], "big")
        if length == 1:
            length = int.from_bytes(content[offset + 8 : offset + 16], "big")
        elif length == 0:
            return len(content)  # the last box, up to the end of the file
        if length < 8:
            return -1
        offset += length
    return offset
