# SPDX-License-Identifier: Apache-2.0
"""Image rules: size from the header, and values of made images."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from mindvl_data.curation.image_rules import measure, media_parts
from mindvl_data.curation.record import Record
from mindvl_data.curation.step import Context, Drop, find_step
from mindvl_data.errors import SampleError


def encoded(pixels: NDArray[np.uint8], image_format: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, image_format, **options)
    return buffer.getvalue()


def noise(height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def run(name: str, *media: bytes, parts: int | None = None, **parameters: Any) -> Any:
    step = find_step(name)
    content = [{"type": "image"}] * (len(media) if parts is None else parts) + [{"type": "text", "text": "x"}]
    record = Record(number=0, id="", body={"content": content}, media=media)
    assert step.function is not None
    return step.function([record], step.config(**parameters), Context(seed=0, cache=Path()))[0]


def test_the_size_is_that_of_the_upright_image() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    content = encoded(noise(40, 80), "JPEG", exif=exif)
    kept = run("image_size", content, min_bytes=0)
    assert isinstance(kept, Record)
    assert kept.facts == {
        "num_images": 1, "image_width": 40, "image_height": 80, "aspect_ratio": 2.0, "image_bytes": len(content),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"min_side": 41}, "small_side"),
        ({"max_side": 79}, "large_side"),
        ({"min_pixels": 3201}, "few_pixels"),
        ({"max_pixels": 3199}, "many_pixels"),
        ({"max_aspect_ratio": 1.99}, "aspect_ratio"),
        ({"min_bytes": 100_000}, "few_bytes"),
        ({"max_bytes": 100}, "many_bytes"),
        ({"min_images": 2}, "too_few_images"),
        ({"max_images": 0}, "too_many_images"),
    ],
)
def test_each_limit_on_the_size_drops_with_its_reason(parameters: dict[str, Any], reason: str) -> None:
    dropped = run("image_size", encoded(noise(40, 80)), **{"min_bytes": 0, **parameters})
    assert isinstance(dropped, Drop)
    assert dropped.reason == reason


def test_the_limits_are_inclusive() -> None:
    limits = {"min_side": 40, "max_side": 80, "min_pixels": 3200, "max_pixels": 3200, "max_aspect_ratio": 2.0}
    assert isinstance(run("image_size", encoded(noise(40, 80)), min_bytes=0, **limits), Record)


def test_every_image_of_a_record_must_pass_and_the_smallest_gives_the_facts() -> None:
    small, large = encoded(noise(30, 30)), encoded(noise(90, 90))
    kept = run("image_size", large, small, min_bytes=0)
    assert (kept.facts["num_images"], kept.facts["image_width"]) == (2, 30)
    assert run("image_size", large, small, min_bytes=0, min_side=31).reason == "small_side"


def test_placeholders_must_match_the_files() -> None:
    assert run("image_size", encoded(noise(40, 80)), parts=2).reason == "placeholders"
    body = {
        "messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]}, {"content": "b"}]
    }
    assert media_parts(body) == ["image"]


def test_animated_images_may_be_dropped() -> None:
    frames = [Image.fromarray(noise(30, 30, seed)) for seed in range(2)]
    buffer = io.BytesIO()
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:])
    assert isinstance(run("image_size", buffer.getvalue(), min_bytes=0), Record)
    assert run("image_size", buffer.getvalue(), min_bytes=0, animated=False).reason == "animated"


def test_an_image_that_cannot_be_opened_is_an_error_of_its_record() -> None:
    with pytest.raises(SampleError, match="cannot be opened"):
        run("image_size", b"no image")


def test_values_of_an_image_of_two_halves() -> None:
    pixels = np.zeros((64, 64, 3), np.uint8)
    pixels[:, 32:] = 200
    # two gray levels of equal share: 1 bit, 100 around the mean; the Laplacian is 200 and -200 in 2 of 62 columns
    assert measure(pixels) == {
        "entropy": 1.0,
        "sharpness": round(2 / 62 * 200**2, 4),
        "dominant_color": 0.5,
        "deviation": 100.0,
        "border": 0.5,
        "gray": 1.0,
    }


def test_values_of_an_image_with_a_frame() -> None:
    pixels = np.full((100, 200, 3), 255, np.uint8)
    pixels[20:80, 50:150] = noise(60, 100)
    values = measure(pixels)
    assert values["border"] == 0.7  # 60 of 100 rows, 100 of 200 columns are inside
    assert run("image_content", encoded(pixels), max_border=0.6).reason == "borders"


def test_values_do_not_depend_on_the_resolution_above_256_pixels() -> None:
    small = noise(128, 256)
    large = small.repeat(3, axis=0).repeat(3, axis=1)
    assert measure(large) == measure(small)


@pytest.mark.parametrize("level", [0, 255])
def test_blank_images_are_dropped(level: int) -> None:
    assert run("image_content", encoded(np.full((64, 64, 3), level, np.uint8))).reason == "blank"


def test_blurred_images_are_dropped_and_sharp_ones_kept() -> None:
    ramp = np.linspace(0, 255, 256).astype(np.uint8)
    smooth = np.stack([np.tile(ramp, (256, 1))] * 3, axis=-1)
    assert run("image_content", encoded(smooth)).reason == "blurred"
    assert isinstance(run("image_content", encoded(noise(256, 256))), Record)


def test_gray_images_may_be_dropped() -> None:
    gray = np.repeat(noise(64, 64)[..., :1], 3, axis=-1)
    assert isinstance(run("image_content", encoded(gray)), Record)
    assert run("image_content", encoded(gray), max_gray=0.9).reason == "gray"


def test_an_image_of_one_pixel_is_measured() -> None:
    assert run("image_content", encoded(noise(1, 1))).reason == "blank"
