# SPDX-License-Identifier: Apache-2.0
"""Images and videos of every odd kind: used, or refused with the reason, before anything is decoded."""

import io
import struct
import zlib
from contextlib import suppress
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mindvl_data import SampleError
from mindvl_data.images import decode
from mindvl_data.shards.media import check_media, media_extension
from mindvl_data.types import MediaSize

LIMIT = 80_000_000


def image(mode: str = "RGB", size: tuple[int, int] = (40, 30), format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    Image.new(mode, size).save(file, format, **options)
    return file.getvalue()


def photo(format: str) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, format)
    return file.getvalue()


def clip(frames: int = 6, container: str = "mp4", codec: str = "mpeg4") -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=container) as muxer:
        stream = muxer.add_stream(codec, rate=3)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for number in range(frames):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), number * 20, np.uint8), format="rgb24")
            muxer.mux(stream.encode(frame))
        muxer.mux(stream.encode())
    return file.getvalue()


def bomb(side: int) -> bytes:
    """A small PNG whose header claims side x side pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(20_000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    "content",
    [
        image("CMYK", format="JPEG"),
        image("I;16"),
        image("P", transparency=0),
        image("RGBA"),
        image("L", format="JPEG"),
        image("LA"),
        image(format="PNG", save_all=True, append_images=[Image.new("RGB", (40, 30), "red")]),
        image(format="WEBP", save_all=True, append_images=[Image.new("RGB", (40, 30), "red")]),
        photo("JPEG"),
        photo("WEBP"),
        photo("JPEG") + b"what a telephone adds after the image",
    ],
)
def test_odd_images_are_used_as_they_are_shown(content: bytes) -> None:
    assert check_media(content, decode_limit=LIMIT, decode_all=True) == MediaSize(30, 40)
    assert decode(content, decode_limit=LIMIT).shape == (30, 40, 3)


def test_a_rotated_image_has_the_size_in_which_it_is_shown() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert check_media(image(format="JPEG", exif=exif), decode_limit=LIMIT) == MediaSize(40, 30)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the format of a file of 0 bytes is not"),
        (b"GIF99a" + bytes(50), "is not JPEG, PNG, WebP, GIF, BMP, TIFF, AVIF, mp4, mov, mkv, webm or avi"),
        (b"GIF89a" + bytes(50), "cannot be"),
        (b"\x80\x04\x95 a pickle", "the format of a file of"),
        (bomb(13_000), "169000000 pixels|13000"),
        (image(size=(5000, 1)), "the aspect ratio of .* pixels is over 200"),
        (b"\xff\xd8\xff" + bytes(30), "truncated"),
        (b"\x89PNG\r\n\x1a\n" + bytes(30), "truncated"),
        (clip()[:-5], "truncated"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_reason(content: bytes, message: str) -> None:
    with pytest.raises(SampleError, match=message):
        check_media(content, decode_limit=LIMIT)


def test_one_pixel_is_an_image() -> None:
    assert check_media(image(size=(1, 1)), decode_limit=LIMIT) == MediaSize(1, 1)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_every_truncation_is_found_without_decoding(format: str) -> None:
    content = photo(format)
    for keep in range(0, len(content), 37):
        with pytest.raises(SampleError):
            check_media(content[:keep], decode_limit=LIMIT)


def test_the_end_mark_of_a_preview_does_not_stand_for_that_of_the_image() -> None:
    preview = photo("JPEG")
    segment = b"\xff\xe1" + struct.pack(">H", len(preview) + 2) + preview
    content = photo("JPEG")[:2] + segment + photo("JPEG")[2:]
    assert check_media(content, decode_limit=LIMIT) == MediaSize(30, 40)
    with pytest.raises(SampleError, match="truncated"):
        check_media(content[:-40], decode_limit=LIMIT)


def test_damage_inside_is_found_when_everything_is_decoded() -> None:
    content = bytearray(photo("PNG"))
    content[len(content) // 2] ^= 255
    check_media(bytes(content), decode_limit=LIMIT)
    with pytest.raises(SampleError, match="cannot be decoded"):
        check_media(bytes(content), decode_limit=LIMIT, decode_all=True)


@pytest.mark.parametrize(
    ("container", "codec", "extension"),
    [("mov", "mpeg4", "mov"), ("matroska", "mpeg4", "mkv"), ("webm", "libvpx-vp9", "webm"), ("avi", "mpeg4", "avi")],
)
def test_a_truncated_video_of_every_container_is_found(container: str, codec: str, extension: str) -> None:
    content = clip(container=container, codec=codec)
    assert media_extension(content) == extension
    assert check_media(content, decode_limit=10_000, decode_all=True).frames == 6
    with pytest.raises(SampleError):
        check_media(content[: len(content) * 2 // 3], decode_limit=10_000)


def test_a_video_has_frames_and_a_rate() -> None:
    assert media_extension(clip()) == "mp4"
    assert check_media(clip(), decode_limit=LIMIT, decode_all=True) == MediaSize(48, 64, 6, 3.0)


def rotated() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return image(format="JPEG", exif=exif)


WHOLE = (photo("JPEG"), photo("PNG"), photo("WEBP"), rotated(), image("P", transparency=0), clip())


@pytest.mark.filterwarnings("ignore:Tag data larger than file")
@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    content=st.sampled_from(WHOLE),
    changes=st.lists(st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=4)), max_size=3),
    near_start=st.booleans(),
)
def test_a_damaged_medium_has_a_size_or_is_a_bad_sample(
    content: bytes, changes: list[tuple[float, bytes]], near_start: bool
) -> None:
    damaged = bytearray(content)
    for share, new in changes:
        place = int(share * (200 if near_start else len(content)))
        damaged[place : place + len(new)] = new
    with suppress(SampleError):
        size = check_media(bytes(damaged), decode_limit=LIMIT, decode_all=True)
        assert size.height > 0
        assert size.width > 0
