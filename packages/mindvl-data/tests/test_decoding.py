# SPDX-License-Identifier: Apache-2.0
"""Decoding: every format and mode as 8-bit RGB, upright, on white; bounded memory; damaged files."""

import io
import random
import struct
import subprocess
import sys
import threading
import zlib
from contextlib import suppress

import numpy as np
import pytest
from PIL import Image, ImageOps, JpegImagePlugin

from mindvl_data import SampleError
from mindvl_data.decoding import _MemoryBudget, opened
from mindvl_data.images import decode, read_size, resize, resize_in_strips
from mindvl_data.patches import Scratch

pytestmark = pytest.mark.slow

LIMIT = 80_000_000


def encoded(image: Image.Image, format: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def noise(height: int, width: int, mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (height // 4 + 1, width // 4 + 1, 4), dtype=np.uint8)
    image = Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)
    if mode == "I;16":
        return Image.fromarray(np.asarray(image)[:, :, 0].astype(np.uint16) * 257)
    return image if mode == "RGBA" else image.convert("RGB").convert(mode)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_rotated_image_is_shown_upright(orientation: int, format: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encoded(noise(56, 84), format, exif=exif)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(content))))
    assert expected.shape[:2] == ((84, 56) if orientation >= 5 else (56, 84))
    assert read_size(content, decode_limit=LIMIT) == expected.shape[:2]
    np.testing.assert_array_equal(decode(content, decode_limit=LIMIT), expected)


def test_a_large_webp_holds_its_orientation_at_its_end() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    noise = np.random.default_rng(0).integers(0, 256, (200, 300, 3), dtype=np.uint8)
    content = encoded(Image.fromarray(noise), "WEBP", lossless=True, exif=exif)
    assert content.find(b"EXIF") > 1 << 16
    assert read_size(content, decode_limit=LIMIT) == (300, 200)


def colour(content: bytes) -> list[int]:
    """The upper left pixel."""
    return list(decode(content, decode_limit=LIMIT)[0, 0].tolist())


def test_transparent_parts_become_white() -> None:
    clear = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    for format in ("PNG", "WEBP", "TIFF", "AVIF"):
        assert colour(encoded(clear, format)) == [255, 255, 255], format
    assert colour(encoded(Image.new("LA", (4, 4), (0, 0)), "PNG")) == [255, 255, 255]
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 0, 10, 20, 30])
    for format in ("PNG", "GIF"):
        assert colour(encoded(palette, format)) == [10, 20, 30]
        assert colour(encoded(palette, format, transparency=1)) == [255, 255, 255], format
    for mode, value in (("RGB", (10, 20, 30)), ("L", 7), ("I;16", 700)):
        plain = Image.new(mode, (4, 4), value)
        assert colour(encoded(plain, "PNG", transparency=value)) == [255, 255, 255], mode


def test_a_half_transparent_pixel_is_blended_with_white() -> None:
    half = Image.new("RGBA", (4, 4), (0, 100, 200, 51))  # a fifth of it
    assert colour(encoded(half, "PNG")) == [204, 224, 244]


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    deep = Image.fromarray(np.full((4, 4), 0x8000, np.uint16))
    for format in ("PNG", "TIFF"):
        assert colour(encoded(deep, format)) == [128, 128, 128]
    inverted = encoded(deep, "TIFF", tiffinfo={262: 0})  # white is zero
    if Image.open(io.BytesIO(inverted)).tag_v2[262] == 0:  # type: ignore[attr-defined]
        assert colour(inverted) == [127, 127, 127]


@pytest.mark.parametrize("mode", ["I", "F"])
def test_values_of_32_bits_are_refused(mode: str) -> None:
    with pytest.raises(SampleError, match="32 bits per channel"):
        colour(encoded(Image.new(mode, (4, 4)), "TIFF"))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["TIFF", "AVIF", "MPO"])
def test_formats_that_keep_orientation_elsewhere_are_upright_too(orientation: int, format: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encoded(noise(56, 84), format, exif=exif)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(content))))
    assert expected.shape[:2] == ((84, 56) if orientation >= 5 else (56, 84))
    assert read_size(content, decode_limit=LIMIT) == expected.shape[:2]
    np.testing.assert_array_equal(decode(content, decode_limit=LIMIT), expected)


@pytest.mark.parametrize("orientation", range(2, 9))
def test_a_turned_jpeg_stays_on_the_fast_decoder(orientation: int, monkeypatch: pytest.MonkeyPatch) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encoded(noise(150, 203), "JPEG", exif=exif)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(content))))

    def refuse(_: Image.Image) -> None:
        raise AssertionError("Pillow decodes it")

    monkeypatch.setattr(JpegImagePlugin.JpegImageFile, "load", refuse)
    np.testing.assert_array_equal(decode(content, decode_limit=LIMIT), expected)
    padded = decode(content, decode_limit=LIMIT, padded=True, scratch=Scratch())
    np.testing.assert_array_equal(padded[:, :, :3], expected)


def test_orientation_far_behind_other_segments_of_a_jpeg_is_found() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    content = encoded(noise(56, 84), "JPEG", exif=exif)
    filler = b"\xff\xeb\xff\xff" + bytes(0xFFFD)
    assert read_size(content[:2] + 3 * filler + content[2:], decode_limit=LIMIT) == (84, 56)


@pytest.mark.parametrize(
    ("format", "mode"),
    [("PNG", "RGB"), ("PNG", "RGBA"), ("PNG", "I;16"), ("JPEG", "RGB"), ("JPEG", "CMYK"), ("WEBP", "RGBA")],
)
@pytest.mark.parametrize("orientation", [1, 3, 6, 7])
def test_an_image_in_strips_gives_the_same_pixels(format: str, mode: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encoded(noise(300, 410, mode), format, exif=exif)
    for height, width in ((112, 140), (56, 840), (300, 84), (560, 410)):
        whole = resize(decode(content, decode_limit=LIMIT), height, width)
        with opened(content, decode_limit=LIMIT) as decoded:
            in_strips = resize_in_strips(decoded, height, width, strip_pixels=7000)
        np.testing.assert_array_equal(in_strips, whole)


DECODE = """
import resource, sys
from mindvl_data import ImageConfig
from mindvl_data.decoding import opened
from mindvl_data.images import to_patches
content = sys.stdin.buffer.read()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with opened(content, decode_limit=80_000_000, padded=True) as image:
    to_patches(image, ImageConfig())
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.parametrize(("format", "mode"), [("PNG", "RGBA"), ("JPEG", "CMYK")])
def test_a_large_image_from_a_small_file_takes_bounded_memory(format: str, mode: str) -> None:
    content = encoded(Image.new(mode, (8900, 8900)), format, compress_level=1)
    done = subprocess.run([sys.executable, "-c", DECODE], input=content, capture_output=True, check=True)
    assert int(done.stdout) < 450  # converted as a whole an RGBA image would take 1,515


def test_a_progressive_jpeg_counts_the_coefficients_it_keeps() -> None:
    image = Image.new("RGB", (400, 400))
    plain = encoded(image, "JPEG")
    decode(plain, decode_limit=160_000)
    with pytest.raises(SampleError, match="takes 2 MB to decode, the decode limit of 160000 pixels"):
        decode(encoded(image, "JPEG", progressive=True, subsampling=0), decode_limit=160_000)
    decode(encoded(image, "JPEG", progressive=True, subsampling=0), decode_limit=320_000)


def _take(budget: _MemoryBudget, order: list[str]) -> None:
    with budget.reserved(1):
        order.append("second")


def test_threads_wait_for_memory_and_one_alone_never_does() -> None:
    budget = _MemoryBudget(10)
    order: list[str] = []
    with budget.reserved(25):
        waiting = threading.Thread(target=lambda: _take(budget, order))
        waiting.start()
        order.append("first")
    waiting.join(300)
    assert order == ["first", "second"]


def test_cmyk_and_gray_become_rgb() -> None:
    for mode in ("CMYK", "L"):
        pixels = decode(encoded(Image.new("RGB", (30, 30), (200, 40, 90)).convert(mode), "JPEG"), decode_limit=LIMIT)
        assert (pixels.dtype, pixels.shape) == (np.uint8, (30, 30, 3))
        expected = (200, 40, 90) if mode == "CMYK" else (93, 93, 93)
        assert np.abs(pixels.astype(int) - expected).max() <= 3


def test_the_first_frame_of_an_animated_image_counts() -> None:
    frames = [Image.new("RGB", (28, 28), colour) for colour in ("red", "blue")]
    for format, options in (("WEBP", {"lossless": True}), ("GIF", {}), ("AVIF", {"quality": 100}), ("TIFF", {})):
        content = encoded(frames[0], format, save_all=True, append_images=frames[1:], **options)
        assert np.abs(np.array(colour(content)) - [255, 0, 0]).max() <= 2, format


BOMB = """
import io, resource, sys
from PIL import Image
from mindvl_data import SampleError
from mindvl_data.images import decode, read_size
content = sys.stdin.buffer.read()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for refuse in (decode, read_size):
    try:
        refuse(content, decode_limit=80_000_000)
    except SampleError as error:
        print(error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_a_bomb_is_refused_from_its_header_and_takes_no_memory() -> None:
    rows = zlib.compress(bytes(1 + 13_000 // 8) * 13_000, 9)  # one bit a pixel, 13,000 by 13,000

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", 13_000, 13_000, 1, 0, 0, 0, 0)
    content = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    assert len(content) < 25_000
    done = subprocess.run([sys.executable, "-c", BOMB], input=content, capture_output=True, check=True)
    *refusals, megabytes = done.stdout.decode().splitlines()
    assert len(refusals) == 2
    assert all("13000" in refusal for refusal in refusals)
    assert int(megabytes) < 20  # decoded it would be 500


def seeds() -> list[bytes]:
    """A small image of every format and of the unusual kinds of each."""
    rgba, rgb = noise(20, 30, "RGBA"), noise(20, 30)
    palette, gray = rgb.quantize(16), noise(20, 30, "I;16")
    exif = Image.Exif()
    exif[0x0112] = 6
    found = [encoded(rgb, format, exif=exif) for format in ("JPEG", "PNG", "WEBP", "TIFF", "AVIF")]
    found += [encoded(rgba, format) for format in ("PNG", "WEBP", "TIFF", "BMP")]
    found += [encoded(palette, format) for format in ("GIF", "PNG", "BMP", "TIFF")]
    found += [encoded(gray, "PNG"), encoded(gray, "TIFF"), encoded(palette, "PNG", transparency=3)]
    found += [encoded(rgb, "JPEG", progressive=True), encoded(rgb.convert("CMYK"), "JPEG")]
    found += [encoded(rgb, "TIFF", compression=kind) for kind in ("jpeg", "tiff_lzw", "tiff_deflate", "packbits")]
    return found


def mutated(content: bytes, choose: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(choose.choice([1, 1, 2, 5, 20])):
        place = choose.randrange(len(changed) if choose.random() < 0.5 else min(len(changed), 80))
        kind = choose.random()
        if kind < 0.6:
            changed[place] = choose.choice([0, 1, 127, 128, 255, choose.randrange(256)])
        elif kind < 0.8:
            changed[place : place + 4] = choose.choice([b"\xff" * 4, bytes(4), b"\x7f\xff\xff\xff", b"\0\0\x22\xc4"])
        else:
            del changed[place : choose.randrange(place, len(changed)) + 1]
        changed = changed or bytearray(1)
    return bytes(changed)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(8))
def test_a_damaged_image_is_decoded_in_the_size_of_its_header_or_is_a_bad_sample(seed: int) -> None:
    choose, decoded = random.Random(seed), 0
    for content in seeds() * 2:
        damaged = mutated(content, choose)
        with suppress(SampleError):
            size = read_size(damaged, decode_limit=1_000_000)
            assert decode(damaged, decode_limit=1_000_000).shape == (*size, 3)
            decoded += 1
    assert decoded > 0


@pytest.mark.parametrize("orientation", [1, 6])
def test_a_jpeg_can_be_decoded_at_a_fraction_of_its_size(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encoded(Image.linear_gradient("L").convert("RGB").resize((160, 80)), "JPEG", exif=exif)
    upright = (80, 160) if orientation == 1 else (160, 80)
    least = (20, 41) if orientation == 1 else (41, 20)
    with opened(content, decode_limit=10**6, padded=True, at_least=least) as image:
        assert image.original == upright
        assert (image.height, image.width) == ((30, 60) if orientation == 1 else (60, 30))  # 3/8: 2/8 is below 41
        assert image.rows(0, image.height).shape == (image.height, image.width, 4)
    with opened(content, decode_limit=10**6, at_least=(upright[0] // 2 + 1, upright[1] // 2 + 1)) as image:
        assert (image.height, image.width) == upright  # more than half is needed
    with opened(content, decode_limit=10**6) as image:
        assert (image.height, image.width) == image.original == upright


def test_other_formats_are_decoded_at_their_size() -> None:
    with opened(encoded(noise(64, 64), "PNG"), decode_limit=10**6, at_least=(8, 8)) as image:
        assert (image.height, image.width) == image.original == (64, 64)
