# SPDX-License-Identifier: Apache-2.0
"""Images: sizes and pixels as transformers' Qwen2-VL processor has them; unusual files; refusals."""

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as published_smart_resize

from mindvl_data import BadSample, ImageConfig, smart_resize
from mindvl_data.images import count_patches, decode, read_size, to_patches

LIMIT = 80_000_000


def encoded(image: Image.Image, format: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def picture(height: int, width: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    channels = {"RGB": 3, "RGBA": 4, "L": 1}[mode]
    pixels = np.random.default_rng(seed).integers(0, 256, (height // 4 + 1, width // 4 + 1, channels), dtype=np.uint8)
    return Image.fromarray(pixels.squeeze(), mode).resize((width, height), Image.Resampling.BICUBIC)


def test_smart_resize_gives_the_published_number() -> None:
    assert smart_resize(561, 278, multiple=28, min_pixels=56 * 56, max_pixels=14 * 14 * 4 * 1280) == (560, 280)


sides = st.integers(1, 6000)


@settings(max_examples=300, deadline=None)
@given(sides, sides, st.sampled_from([784, 3136, 50_176]), st.sampled_from([50_176, 100_352, 1_003_520]))
def test_smart_resize_equals_transformers_for_any_size(height: int, width: int, low: int, high: int) -> None:
    config = ImageConfig(min_pixels=low, max_pixels=high)
    counted = int(count_patches(np.array([height]), np.array([width]), config)[0])
    if max(height, width) > 200 * min(height, width):
        assert counted == -1
        with pytest.raises(BadSample, match="200 times"):
            smart_resize(height, width, multiple=28, min_pixels=low, max_pixels=high)
        return
    expected = published_smart_resize(height, width, 28, low, high)
    assert smart_resize(height, width, multiple=28, min_pixels=low, max_pixels=high) == expected
    assert counted == expected[0] * expected[1] // 14**2


@pytest.mark.parametrize(("format", "size"), [("PNG", (100, 130)), ("JPEG", (311, 97)), ("WEBP", (40, 40))])
def test_patches_equal_those_of_transformers(format: str, size: tuple[int, int]) -> None:
    content = encoded(picture(*size), format)
    config = ImageConfig(min_pixels=56 * 56, max_pixels=140 * 140)
    ours, grid = to_patches(decode(content, decode_limit=LIMIT), config)
    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": config.min_pixels, "longest_edge": config.max_pixels},
        do_rescale=False,
        do_normalize=False,
    )
    theirs = processor(images=[Image.open(io.BytesIO(content))], return_tensors="np")
    assert theirs["image_grid_thw"].tolist() == [list(grid)]
    both_times = theirs["pixel_values"].reshape(len(ours), 3, 2, 14, 14)
    expected = both_times[:, :, 0].reshape(len(ours), -1)
    np.testing.assert_array_equal(both_times[:, :, 0], both_times[:, :, 1])
    assert np.abs(ours.astype(float) - expected).mean() <= 1.0
    assert np.abs(ours.astype(float) - expected).max() <= 2.0


def test_a_rotated_picture_is_shown_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    content = encoded(picture(56, 84), "JPEG", exif=exif)
    assert read_size(content, decode_limit=LIMIT) == (84, 56)
    assert decode(content, decode_limit=LIMIT).size == (56, 84)


def test_transparent_parts_become_white() -> None:
    clear = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    assert decode(encoded(clear, "PNG"), decode_limit=LIMIT).getpixel((0, 0)) == (255, 255, 255)
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 0, 10, 20, 30])
    assert decode(encoded(palette, "PNG"), decode_limit=LIMIT).getpixel((0, 0)) == (10, 20, 30)
    assert decode(encoded(palette, "PNG", transparency=1), decode_limit=LIMIT).getpixel((0, 0)) == (255, 255, 255)


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    deep = Image.fromarray(np.full((4, 4), 0x8000, np.uint16))
    assert decode(encoded(deep, "PNG"), decode_limit=LIMIT).getpixel((0, 0)) == (128, 128, 128)


def test_cmyk_and_gray_become_rgb() -> None:
    for mode in ("CMYK", "L"):
        image = decode(encoded(picture(30, 30).convert(mode), "JPEG"), decode_limit=LIMIT)
        assert (image.mode, image.size) == ("RGB", (30, 30))


def test_the_first_frame_of_an_animated_picture_counts() -> None:
    frames = [Image.new("RGB", (28, 28), colour) for colour in ("red", "blue")]
    content = encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True)
    assert decode(content, decode_limit=LIMIT).getpixel((0, 0)) == (255, 0, 0)


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
