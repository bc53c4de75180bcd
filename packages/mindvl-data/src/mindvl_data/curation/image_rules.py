# SPDX-License-Identifier: Apache-2.0
"""Steps that measure images: size from the header; entropy, blur, blank areas and borders from the pixels.

Comes after record.py. A record passes if each of its images passes; a record without images passes. The facts are those of
the image that fails, or of the worst one (the smallest, the least sharp).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mindvl_data.config import ImageConfig
from mindvl_data.curation.limits import check_range
from mindvl_data.curation.record import Record
from mindvl_data.curation.step import Context, Drop, Outcome, Step
from mindvl_data.errors import SampleError
from mindvl_data.image_files import open_image, orientation
from mindvl_data.shards.media import media_extension
from mindvl_data.shards.tar import VIDEO_EXTENSIONS

# Pixels of the longer side at which pixels are measured, so that values do not depend on the resolution.
MEASURED_SIZE = 256
_TOLERANCE = 8  # gray levels within which colors are equal


@dataclass(frozen=True)
class ImageSize:
    """Limits on size, shape and number of images.

    Attributes:
        min_side, max_side: Minimum of the shorter side and maximum of the longer side, in pixels. Default minimum: 28, one
            visual token of Qwen2.5-VL.
        min_pixels, max_pixels: Limits of the number of pixels of an image.
        max_aspect_ratio: Maximum of the longer side divided by the shorter one. Default: 200, the limit of Qwen2.5-VL's
            processor; CC12M allows 2.5.
        min_bytes, max_bytes: Limits of the bytes of the encoded image. Default minimum: 5,000, as in LAION-5B.
        min_images, max_images: Limits of the number of images of a record.
        animated: Keep images with several frames, of which training uses the first.
    """

    min_side: int = 28
    max_side: int | None = None
    min_pixels: int = 0
    max_pixels: int | None = None
    max_aspect_ratio: float = 200.0
    min_bytes: int = 5000
    max_bytes: int | None = None
    min_images: int = 0
    max_images: int | None = None
    animated: bool = True

    def __post_init__(self) -> None:
        for name in ("side", "pixels", "bytes", "images"):
            check_range(name, getattr(self, f"min_{name}"), getattr(self, f"max_{name}"))
        check_range("aspect_ratio", None, self.max_aspect_ratio, lowest=1.0)


@Step(
    config=ImageSize,
    summary="Drop records by the size, aspect ratio, bytes, frames and number of their images.",
    section="B.1.1",
    needs=("image",),
    gives=("num_images", "image_width", "image_height", "aspect_ratio", "image_bytes"),
    reasons={
        "placeholders": "The text has another number of image placeholders than the record has files.",
        "too_few_images": "The record has fewer images than min_images.",
        "too_many_images": "The record has more images than max_images.",
        "small_side": "The shorter side is below min_side.",
        "large_side": "The longer side is above max_side.",
        "few_pixels": "The image has fewer pixels than min_pixels.",
        "many_pixels": "The image has more pixels than max_pixels.",
        "aspect_ratio": "The longer side divided by the shorter one is above max_aspect_ratio.",
        "few_bytes": "The file has fewer bytes than min_bytes.",
        "many_bytes": "The file has more bytes than max_bytes.",
        "animated": "The image has several frames.",
    },
)
def image_size(records: list[Record], config: ImageSize, context: Context) -> Sequence[Outcome]:
    """Drop images by size, shape, bytes, frames and number (paper, B.1.1: image-based criteria). Decodes nothing."""
    return [_size_outcome(record, config) for record in records]


def _size_outcome(record: Record, config: ImageSize) -> Outcome:
    images = [content for content in record.media if not is_video(content)]
    placeholders = sum(1 for kind in media_parts(record.body) if kind in ("image", "video"))
    facts: dict[str, Any] = {"num_images": len(images)}
    if placeholders != len(record.media):
        return Drop("placeholders", value=f"{placeholders} placeholders, {len(record.media)} files", facts=facts)
    if len(images) < config.min_images:
        return Drop("too_few_images", value=len(images), facts=facts)
    if config.max_images is not None and len(images) > config.max_images:
        return Drop("too_many_images", value=len(images), facts=facts)
    for content in images:
        width, height, frames = read_size(content)
        ratio = round(max(width, height) / min(width, height), 4)
        values = {"image_width": width, "image_height": height, "aspect_ratio": ratio, "image_bytes": len(content)}
        if "image_width" not in facts or width * height < facts["image_width"] * facts["image_height"]:
            facts |= values  # the smallest image
        checks: tuple[tuple[str, float, float | None, float | None], ...] = (
            ("small_side", min(width, height), config.min_side, None),
            ("large_side", max(width, height), None, config.max_side),
            ("few_pixels", width * height, config.min_pixels, None),
            ("many_pixels", width * height, None, config.max_pixels),
            ("aspect_ratio", max(width, height) / min(width, height), None, config.max_aspect_ratio),
            ("few_bytes", len(content), config.min_bytes, None),
            ("many_bytes", len(content), None, config.max_bytes),
            ("animated", frames, None, None if config.animated else 1),
        )
        for reason, value, least, most in checks:
            if (least is not None and value < least) or (most is not None and value > most):
                return Drop(reason, value=round(value, 4), facts=facts | values)
    return record.with_facts(**facts)


@dataclass(frozen=True)
class ImageContent:
    """Limits on what an image shows, measured at 256 pixels.

    Attributes:
        min_entropy: Minimum entropy of the gray levels in bits, 0 to 8. A photo has 6 to 8, a drawing of a few colors 1 to 3.
        min_sharpness: Minimum variance of the Laplacian of the gray levels. Sharper images have a larger variance; 0 keeps
            all.
        max_dominant: Maximum share of the most frequent color, with 32 levels per channel: near 1 for blank images.
        min_deviation: Minimum standard deviation of the gray levels, 0 to 127.5: near 0 for blank images.
        max_border: Maximum share of the image in borders of one color, as around images with padding or a caption bar.
        max_gray: Maximum share of pixels without color; 1 keeps gray images.
    """

    min_entropy: float = 0.5
    min_sharpness: float = 2.0
    max_dominant: float = 0.98
    min_deviation: float = 2.0
    max_border: float = 0.6
    max_gray: float = 1.0

    def __post_init__(self) -> None:
        check_range("entropy", self.min_entropy, 8.0)
        check_range("sharpness", self.min_sharpness, None)
        check_range("deviation", self.min_deviation, None)
        for name in ("dominant", "border", "gray"):
            check_range(name, None, getattr(self, f"max_{name}"))


@Step(
    config=ImageContent,
    summary="Drop blank images, blurred images and images with wide borders.",
    section="B.1.1",
    needs=("image",),
    gives=("entropy", "sharpness", "dominant_color", "deviation", "border", "gray"),
    reasons={
        "blank": "One color covers more than max_dominant, or gray levels deviate less than min_deviation.",
        "low_entropy": "The entropy is below min_entropy.",
        "blurred": "The variance of the Laplacian is below min_sharpness.",
        "borders": "The share of borders of one color is above max_border.",
        "gray": "The share of pixels without color is above max_gray.",
    },
)
def image_content(records: list[Record], config: ImageContent, context: Context) -> Sequence[Outcome]:
    """Drop blank, blurred and framed images (paper, B.1.1: image-based criteria)."""
    return [_content_outcome(record, config) for record in records]


def _content_outcome(record: Record, config: ImageContent) -> Outcome:
    worst: dict[str, float] = {}
    for index, content in enumerate(record.media):
        if is_video(content):
            continue
        values = measure(record.image(index))
        for reason, fact, least, most in (
            ("blank", "dominant_color", None, config.max_dominant),
            ("blank", "deviation", config.min_deviation, None),
            ("low_entropy", "entropy", config.min_entropy, None),
            ("blurred", "sharpness", config.min_sharpness, None),
            ("borders", "border", None, config.max_border),
            ("gray", "gray", None, config.max_gray),
        ):
            value = values[fact]
            if (least is not None and value < least) or (most is not None and value > most):
                return Drop(reason, value=value, facts=values)
        if not worst or values["sharpness"] < worst["sharpness"]:
            worst = values
    return record.with_facts(**worst)


def measure(pixels: NDArray[np.uint8]) -> dict[str, float]:
    """Facts about an image, measured at 256 pixels on its longer side.

    Args:
        pixels: RGB [H, W, 3].

    Returns:
        entropy (bits), sharpness, dominant_color, deviation (gray levels), border and gray, rounded to 4 decimals.
    """
    small = _reduced(pixels)
    gray = (small.astype(np.int64) @ np.array([299, 587, 114]) + 500) // 1000  # [H, W], as Pillow converts to gray
    shares = np.bincount(gray.ravel(), minlength=256) / gray.size
    shares = shares[shares > 0]
    colors = small.astype(np.int64) >> 3
    codes = (colors[..., 0] << 10) | (colors[..., 1] << 5) | colors[..., 2]
    values = {
        "entropy": -float(np.sum(shares * np.log2(shares))),
        "sharpness": _sharpness(gray),
        "dominant_color": float(np.bincount(codes.ravel()).max() / codes.size),
        "deviation": float(gray.std()),
        "border": _border(small),
        "gray": float(np.mean(np.ptp(small.astype(np.int64), axis=-1) <= _TOLERANCE)),
    }
    return {name: round(value + 0.0, 4) for name, value in values.items()}


def is_video(content: bytes) -> bool:
    """Whether the bytes are a video."""
    return media_extension(content) in VIDEO_EXTENSIONS


def media_parts(body: dict[str, Any]) -> list[str]:
    """The type of every part of `content` or of the messages that is not text."""
    contents = [turn.get("content") for turn in body.get("messages") or () if isinstance(turn, dict)]
    contents.append(body.get("content"))
    return [
        str(part.get("type"))
        for content in contents
        if isinstance(content, list)
        for part in content
        if isinstance(part, dict) and part.get("type") != "text"
    ]


def read_size(content: bytes) -> tuple[int, int, int]:
    """Upright width and height in pixels and number of frames, from the header.

    Raises:
        SampleError: The image cannot be opened or is larger than the limit of decoding.
    """
    image = open_image(content, ImageConfig().decode_limit)
    try:
        frames = getattr(image, "n_frames", 1)
    except Exception as error:  # a damaged file may raise errors of many types
        raise SampleError(f"the frames of the image cannot be counted: {error}") from error
    width, height = image.size if orientation(image, content) < 5 else image.size[::-1]
    return width, height, frames


def _reduced(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The image with at most 256 pixels on its longer side."""
    height, width = pixels.shape[:2]
    scale = MEASURED_SIZE / max(height, width)
    if scale >= 1:
        return pixels
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BOX))


def _sharpness(gray: NDArray[Any]) -> float:
    """Variance of the Laplacian; 0 for images of less than three rows or columns."""
    if min(gray.shape) < 3:
        return 0.0
    inner = gray[1:-1, 1:-1]
    return float((gray[:-2, 1:-1] + gray[2:, 1:-1] + gray[1:-1, :-2] + gray[1:-1, 2:] - 4 * inner).var())


def _border(pixels: NDArray[np.uint8]) -> float:
    """Share of the image in rows and columns at its edges that have the color of the first or the last pixel."""
    return max(1.0 - _inside(pixels, corner) for corner in (pixels[0, 0], pixels[-1, -1]))


def _inside(pixels: NDArray[np.uint8], color: NDArray[np.uint8]) -> float:
    equal = np.abs(pixels.astype(np.int64) - color).max(axis=-1) <= _TOLERANCE  # [H, W]
    share = 1.0
    for axis in (0, 1):
        content = np.flatnonzero(~equal.all(axis=1 - axis))
        share *= (int(content[-1] - content[0]) + 1) / equal.shape[axis] if len(content) else 0.0
    return share
