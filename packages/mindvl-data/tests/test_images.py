# SPDX-License-Identifier: Apache-2.0
"""Images: sizes and pixels as transformers' Qwen2-VL processor has them; unusual files; refusals."""

import io
import struct
import subprocess
import sys
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as published_smart_resize
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

from mindvl_data import BadSample, ImageConfig, smart_resize
from mindvl_data.images import count_patches, decode, read_size, to_patches
from mindvl_data.patches import PatchRoom, Scratch

LIMIT = 80_000_000


def encoded(image: Image.Image, format: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def picture(height: int, width: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    channels = {"RGB": 3, "RGBA": 4, "L": 1}[mode]
    pixels = np.random.default_rng(seed).integers(0, 256, (height // 4 + 1, width // 4 + 1, channels), dtype=np.uint8)
    return Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels, mode).resize(
        (width, height), Image.Resampling.BICUBIC
    )


def test_smart_resize_gives_the_published_number() -> None:
    assert smart_resize(561, 278, multiple=28, min_pixels=56 * 56, max_pixels=14 * 14 * 4 * 1280) == (560, 280)


sides = st.integers(1, 6000)


@settings(max_examples=300, deadline=None)
@given(sides, sides, st.sampled_from([784, 3136, 50_176]), st.sampled_from([50_176, 100_352, 1_003_520]))
def test_smart_resize_equals_transformers_for_any_size(height: int, width: int, low: int, high: int) -> None:
    counted = int(
        count_patches(
            np.array([height]), np.array([width]), patch_size=14, multiple=28, min_pixels=low, max_pixels=high
        )[0]
    )
    if max(height, width) > 200 * min(height, width):
        assert counted == -1
        with pytest.raises(BadSample, match="200 times"):
            smart_resize(height, width, multiple=28, min_pixels=low, max_pixels=high)
        return
    expected = published_smart_resize(height, width, 28, low, high)
    assert smart_resize(height, width, multiple=28, min_pixels=low, max_pixels=high) == expected
    assert counted == expected[0] * expected[1] // 14**2


def wide_sample() -> list[tuple[str, str, tuple[int, int]]]:
    """Formats, modes and sizes: thin, tiny, exact multiples, one off, large."""
    generator = np.random.default_rng(7)
    sizes = [(1, 1), (28, 28), (27, 29), (56, 84), (100, 130), (311, 97), (3, 590), (1400, 9), (561, 278), (1205, 903)]
    sizes += [tuple(size) for size in np.exp(generator.uniform(1.5, 7, (14, 2))).astype(int).tolist()]
    sizes = [(h, w) for h, w in sizes if max(h, w) <= 200 * min(h, w)]
    kinds = [("PNG", "RGB"), ("JPEG", "RGB"), ("WEBP", "RGB"), ("JPEG", "L"), ("PNG", "L")]
    return [(*kinds[number % len(kinds)], size) for number, size in enumerate(sizes)]


@pytest.mark.parametrize("processor_class", [Qwen2VLImageProcessorPil, Qwen2VLImageProcessor])
def test_grid_and_patches_equal_those_of_transformers(processor_class: Any) -> None:
    config = ImageConfig(min_pixels=56 * 56, max_pixels=448 * 448)
    processor = processor_class(
        size={"shortest_edge": config.min_pixels, "longest_edge": config.max_pixels},
        do_rescale=False,
        do_normalize=False,
    )
    for seed, (format, mode, size) in enumerate(wide_sample()):
        content = encoded(picture(*size, mode=mode, seed=seed), format)
        ours, grid = to_patches(decode(content, decode_limit=LIMIT), config)
        theirs = processor(images=[Image.open(io.BytesIO(content)).convert("RGB")], return_tensors="np")
        assert theirs["image_grid_thw"].tolist() == [list(grid)], (format, mode, size)
        both_times = theirs["pixel_values"].reshape(len(ours), 3, 2, 14, 14)
        difference = np.abs(ours.astype(float) - both_times[:, :, 0].reshape(len(ours), -1))
        assert difference.mean() <= 1.0, (format, mode, size)
        assert difference.max() <= 6.0, (format, mode, size)


def test_a_picture_that_needs_no_resize_keeps_its_pixels_in_merge_block_order() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (56, 84, 3), dtype=np.uint8)
    patches, grid = to_patches(pixels, ImageConfig(min_pixels=784, max_pixels=10_000))
    assert grid == (1, 4, 6)
    places = [(r + i, c + j) for r in (0, 2) for c in (0, 2, 4) for i in (0, 1) for j in (0, 1)]
    for patch, (row, column) in zip(patches, places, strict=True):
        square = pixels[14 * row : 14 * row + 14, 14 * column : 14 * column + 14]
        np.testing.assert_array_equal(patch.reshape(3, 14, 14), square.transpose(2, 0, 1))


def test_a_jpeg_has_the_pixels_that_pillow_gives_it() -> None:
    for mode in ("RGB", "L"):
        content = encoded(picture(97, 203, mode=mode), "JPEG", quality=80)
        expected = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
        np.testing.assert_array_equal(decode(content, decode_limit=LIMIT), expected)


@pytest.mark.parametrize("size", [(97, 203), (56, 84), (600, 500)])
def test_a_channel_of_no_meaning_changes_no_patch(size: tuple[int, int]) -> None:
    content = encoded(picture(*size), "JPEG", quality=80)
    plain, padded = (decode(content, decode_limit=LIMIT, padded=padded) for padded in (False, True))
    assert (plain.shape[2], padded.shape[2]) == (3, 4)
    config = ImageConfig(max_pixels=200_000)
    np.testing.assert_array_equal(to_patches(plain, config)[0], to_patches(padded, config)[0])


def test_pictures_one_after_another_through_the_same_memory_keep_their_patches() -> None:
    config, scratch = ImageConfig(min_pixels=784, max_pixels=100_000), Scratch()
    contents = [encoded(picture(*size), "JPEG") for size in ((97, 203), (400, 300), (56, 84), (300, 420))]
    alone = [to_patches(decode(content, decode_limit=LIMIT), config)[0] for content in contents]
    room = PatchRoom(sum(map(len, alone)), 588, scratch)
    for content in contents:
        to_patches(decode(content, decode_limit=LIMIT, padded=True, scratch=scratch), config, room)
    np.testing.assert_array_equal(room.since(0), np.concatenate(alone))


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_rotated_picture_is_shown_upright(orientation: int, format: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encoded(picture(56, 84), format, exif=exif)
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
    assert colour(encoded(clear, "PNG")) == [255, 255, 255]
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 0, 10, 20, 30])
    assert colour(encoded(palette, "PNG")) == [10, 20, 30]
    assert colour(encoded(palette, "PNG", transparency=1)) == [255, 255, 255]


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    deep = Image.fromarray(np.full((4, 4), 0x8000, np.uint16))
    assert colour(encoded(deep, "PNG")) == [128, 128, 128]


def test_cmyk_and_gray_become_rgb() -> None:
    for mode in ("CMYK", "L"):
        pixels = decode(encoded(Image.new("RGB", (30, 30), (200, 40, 90)).convert(mode), "JPEG"), decode_limit=LIMIT)
        assert (pixels.dtype, pixels.shape) == (np.uint8, (30, 30, 3))
        expected = (200, 40, 90) if mode == "CMYK" else (93, 93, 93)
        assert np.abs(pixels.astype(int) - expected).max() <= 3


def test_the_first_frame_of_an_animated_picture_counts() -> None:
    frames = [Image.new("RGB", (28, 28), colour) for colour in ("red", "blue")]
    content = encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True)
    assert colour(content) == [255, 0, 0]


@pytest.mark.parametrize("format", ["JPEG", "PNG"])
def test_a_truncated_picture_is_a_bad_sample(format: str) -> None:
    content = encoded(picture(200, 200), format)
    with pytest.raises(BadSample):
        decode(content[: len(content) // 2], decode_limit=LIMIT)


@pytest.mark.parametrize("content", [b"", b"not a picture", b"GIF89a" + bytes(30)])
def test_other_bytes_are_a_bad_sample(content: bytes) -> None:
    with pytest.raises(BadSample):
        read_size(content, decode_limit=LIMIT)


def test_a_picture_that_claims_too_many_pixels_is_not_decoded() -> None:
    content = encoded(Image.new("1", (4000, 4000)), "PNG")
    with pytest.raises(BadSample, match="decode limit"):
        decode(content, decode_limit=1_000_000)
    jpeg = encoded(Image.new("L", (2000, 2000)), "JPEG")
    with pytest.raises(BadSample, match="decode limit"):
        decode(jpeg, decode_limit=1_000_000)


BOMB = """
import io, resource, sys
from PIL import Image
from mindvl_data import BadSample
from mindvl_data.images import decode, read_size
content = sys.stdin.buffer.read()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for refuse in (decode, read_size):
    try:
        refuse(content, decode_limit=80_000_000)
    except BadSample as error:
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


def test_pictures_of_one_pixel_and_of_a_thin_line() -> None:
    patches, grid = to_patches(decode(encoded(picture(1, 1), "PNG"), decode_limit=LIMIT), ImageConfig())
    assert (patches.shape, grid) == ((16, 588), (1, 4, 4))
    with pytest.raises(BadSample, match="200 times"):
        to_patches(decode(encoded(picture(1, 5000), "PNG"), decode_limit=LIMIT), ImageConfig())
