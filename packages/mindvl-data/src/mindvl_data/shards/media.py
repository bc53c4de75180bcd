# SPDX-License-Identifier: Apache-2.0
"""One image or video of a shard: what it is, whether it is whole, how large.

Used when shards are written and when they are indexed, so that what was written can be indexed. JPEG, PNG,
WebP and mp4 are not decoded unless asked: sizes come from headers, and the mark that ends each format tells whether the
file was cut off.
"""

import numpy as np

from mindvl_data.decoding import opened
from mindvl_data.errors import SampleError
from mindvl_data.image_files import read_jpeg_header
from mindvl_data.images import MAX_ASPECT_RATIO, read_size
from mindvl_data.types import MediaSize
from mindvl_data.video import VideoLayout, probe, used_frames

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_END = b"\x00\x00\x00\x00IEND\xaeB`\x82"
_JPEG_END = b"\xff\xd9"
_TIFF_SIGNATURES = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_BMP_HEADER_SIZES = (12, 16, 40, 52, 56, 64, 108, 124)
_AVIF_BRANDS = (b"avif", b"avis")
_WHOLE_IF_DECODED = ("gif", "bmp", "tiff", "avif")  # rare, and no mark tells that they were cut off
_KINDS = "JPEG, PNG, WebP, GIF, BMP, TIFF, AVIF or mp4"


def media_extension(content: bytes) -> str | None:
    """The extension that the bytes ask for, whatever the file was called; None if this is no medium of ours."""
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
    if content[4:8] != b"ftyp":
        return None
    return "avif" if _brands(content) & {*_AVIF_BRANDS} else "mp4"


def check_media(content: bytes, *, decode_limit: int, decode_all: bool = False) -> MediaSize:
    """The size of an image or video as shown.

    Args:
        decode_limit: Pixels; an image that claims more is refused before anything is decoded.
        decode_all: Decode every pixel, which also finds damage inside.

    Raises:
        SampleError: It is damaged, cut off, of another kind, or of a shape that no budget can use.
    """
    extension = media_extension(content)
    if extension is None:
        raise SampleError(f"file of {len(content)} bytes is none of {_KINDS}")
    if not _is_whole(content, extension):
        raise SampleError(f"{extension} of {len(content)} bytes is cut off: its end is missing")
    if extension == "mp4":
        size = probe(content)
        if decode_all:
            every = VideoLayout(
                frames=np.arange(size.frames), height=0, width=0, grid=(size.frames, 0, 0), seconds_per_grid=0.0
            )
            for _ in used_frames(content, size, every):
                pass
    else:
        size = MediaSize(*read_size(content, decode_limit=decode_limit))
        if decode_all or extension in _WHOLE_IF_DECODED:
            with opened(content, decode_limit=decode_limit) as image:
                image.rows(0, 1)
    if max(size.height, size.width) > MAX_ASPECT_RATIO * min(size.height, size.width):
        raise SampleError(
            f"image of {size.height}x{size.width} pixels: one side is more than {MAX_ASPECT_RATIO} times the other"
        )
    return size


def _is_whole(content: bytes, extension: str) -> bool:
    if extension == "jpg":
        # the end mark cannot occur inside compressed data; before them it can, in the preview of a camera
        return content.rfind(_JPEG_END, read_jpeg_header(content).first_scan) >= 0
    if extension == "png":
        return content.rfind(_PNG_END) >= 0
    if extension == "webp":
        return len(content) >= 8 + int.from_bytes(content[4:8], "little")
    if extension in _WHOLE_IF_DECODED:
        return True
    return _boxes_end(content) == len(content)


def _brands(content: bytes) -> set[bytes]:
    """What an ISO file says it is: its main brand, and those it is compatible with."""
    end = min(int.from_bytes(content[:4], "big"), len(content), 256)
    return {content[8:12], *(content[place : place + 4] for place in range(16, end - 3, 4))}


def _boxes_end(content: bytes) -> int:
    """Where the last box of an mp4 ends, as the boxes say; -1 where they make no sense."""
    place = 0
    while place < len(content):
        length = int.from_bytes(content[place : place + 4], "big")
        if length == 1:
            length = int.from_bytes(content[place + 8 : place + 16], "big")
        elif length == 0:
            return len(content)  # the last box, up to the end of the file
        if length < 8:
            return -1
        place += length
    return place
