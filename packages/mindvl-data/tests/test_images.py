# SPDX-License-Identifier: Apache-2.0
"""Images: sizes and pixels as transformers' Qwen2-VL processor has them; unusual files; refusals."""

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as published_smart_resize
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

from mindvl_data import ImageConfig, SampleError, smart_resize
from mindvl_data.images import count_patches, decode, read_size, to_patches
from mindvl_data.patches import PatchBuffer, Scratch

LIMIT = 80_000_000


def encoded(image: Image.Image, format: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def image(height: int, width: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    channels = {"RGB": 3, "RGBA": 4, "L": 1}[mode]
    pixels = np.random.default_rng(seed).integers(0, 256, (height // 4 + 1, width // 4 + 1, channels), dtype=np.uint8)
    return Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels, mode).resize(
        (width, height), Image.Resampling.BICUBIC
    )


def test_smart_resize_gives_the_published_number() -> None:
    assert smart_resize(561, 278, multiple=28, min_pixels=56 * 56, max_pixels=14 * 14 * 4 * 1280) == (560, 280)


def test_an_image_of_exactly_the_largest_size_is_not_made_smaller() -> None:
    assert smart_resize(50, 60, multiple=28, min_pixels=784, max_pixels=56 * 56) == (56, 56)


sides = st.integers(1, 6000)


@settings(max_examples=300, deadline=None)
@example(2, 400, 784, 50_176)  # the largest aspect ratio
@given(sides, sides, st.sampled_from([784, 3136, 50_176]), st.sampled_from([50_176, 100_352, 1_003_520]))
def test_smart_resize_equals_transformers_for_any_size(height: int, width: int, low: int, high: int) -> None:
    counted = int(
        count_patches(
            np.array([height]), np.array([width]), patch_size=14, multiple=28, min_pixels=low, max_pixels=high
        )[0]
    )
    if max(height, width) > 200 * min(height, width):
        assert counted == -1
        with pytest.raises(SampleError, match="aspect ratio"):
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
        content = encoded(image(*size, mode=mode, seed=seed), format)
        ours, grid = to_patches(decode(content, decode_limit=LIMIT), config)
        theirs = processor(images=[Image.open(io.BytesIO(content)).convert("RGB")], return_tensors="np")
        assert theirs["image_grid_thw"].tolist() == [list(grid)], (format, mode, size)
        both_times = theirs["pixel_values"].reshape(len(ours), 3, 2, 14, 14)
        difference = np.abs(ours.astype(float) - both_times[:, :, 0].reshape(len(ours), -1))
        assert difference.mean() <= 1.0, (format, mode, size)
        assert difference.max() <= 6.0, (format, mode, size)


def test_an_image_that_needs_no_resize_keeps_its_pixels_in_merge_block_order() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (56, 84, 3), dtype=np.uint8)
    patches, grid = to_patches(pixels, ImageConfig(min_pixels=784, max_pixels=10_000))
    assert grid == (1, 4, 6)
    places = [(r + i, c + j) for r in (0, 2) for c in (0, 2, 4) for i in (0, 1) for j in (0, 1)]
    for patch, (row, column) in zip(patches, places, strict=True):
        square = pixels[14 * row : 14 * row + 14, 14 * column : 14 * column + 14]
        np.testing.assert_array_equal(patch.reshape(3, 14, 14), square.transpose(2, 0, 1))


def test_a_jpeg_has_the_pixels_that_pillow_gives_it() -> None:
    for mode in ("RGB", "L"):
        content = encoded(image(97, 203, mode=mode), "JPEG", quality=80)
        expected = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
        np.testing.assert_array_equal(decode(content, decode_limit=LIMIT), expected)


@pytest.mark.parametrize("size", [(97, 203), (56, 84), (600, 500)])
def test_a_channel_of_no_meaning_changes_no_patch(size: tuple[int, int]) -> None:
    content = encoded(image(*size), "JPEG", quality=80)
    plain, padded = (decode(content, decode_limit=LIMIT, padded=padded) for padded in (False, True))
    assert (plain.shape[2], padded.shape[2]) == (3, 4)
    config = ImageConfig(max_pixels=200_000)
    np.testing.assert_array_equal(to_patches(plain, config)[0], to_patches(padded, config)[0])


def test_images_one_after_another_through_the_same_memory_keep_their_patches() -> None:
    config, scratch = ImageConfig(min_pixels=784, max_pixels=100_000), Scratch()
    contents = [encoded(image(*size), "JPEG") for size in ((97, 203), (400, 300), (56, 84), (300, 420))]
    alone = [to_patches(decode(content, decode_limit=LIMIT), config)[0] for content in contents]
    buffer = PatchBuffer(sum(map(len, alone)), 588, scratch)
    for content in contents:
        to_patches(decode(content, decode_limit=LIMIT, padded=True, scratch=scratch), config, buffer)
    np.testing.assert_array_equal(buffer.since(0), np.concatenate(alone))


@pytest.mark.parametrize("format", ["JPEG", "PNG"])
def test_a_truncated_image_is_a_bad_sample(format: str) -> None:
    content = encoded(image(200, 200), format)
    with pytest.raises(SampleError):
        decode(content[: len(content) // 2], decode_limit=LIMIT)


@pytest.mark.parametrize("content", [b"", b"not an image", b"GIF89a" + bytes(30)])
def test_other_bytes_are_a_bad_sample(content: bytes) -> None:
    with pytest.raises(SampleError):
        read_size(content, decode_limit=LIMIT)


def test_an_image_that_claims_too_many_pixels_is_not_decoded() -> None:
    content = encoded(Image.new("1", (4000, 4000)), "PNG")
    with pytest.raises(SampleError, match="decode limit"):
        decode(content, decode_limit=1_000_000)
    jpeg = encoded(Image.new("L", (2000, 2000)), "JPEG")
    with pytest.raises(SampleError, match="decode limit"):
        decode(jpeg, decode_limit=1_000_000)


def test_images_of_one_pixel_and_of_a_thin_line() -> None:
    patches, grid = to_patches(decode(encoded(image(1, 1), "PNG"), decode_limit=LIMIT), ImageConfig())
    assert (patches.shape, grid) == ((16, 588), (1, 4, 4))
    with pytest.raises(SampleError, match="aspect ratio"):
        to_patches(decode(encoded(image(1, 5000), "PNG"), decode_limit=LIMIT), ImageConfig())
