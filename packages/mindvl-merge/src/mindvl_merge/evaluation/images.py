# SPDX-License-Identifier: Apache-2.0
"""Read the images of benchmark items, with the decoder of training.

Used by predict.py and remote.py, and by the pages that show items.
"""

import hashlib
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any, Protocol

from mindvl_merge.errors import EvaluationError
from mindvl_merge.evaluation.benchmark import EmbeddedImage, ImageSource
from mindvl_merge.evaluation.grounding import Size


class ImageDecoder(Hashable, Protocol):
    """What evaluation needs of the training's image code; errors are EvaluationError without the file's name."""

    def read_size(self, content: bytes) -> Size:
        """Height and width as shown (EXIF orientation applied), from the header of an image file."""

    def decode(self, content: bytes) -> Any:
        """Pixels uint8 `[height, width, 3]` of an image file."""

    def decode_scaled(self, content: bytes, size: Size) -> Any:
        """Pixels uint8 `[*size, 3]` of an image file, resized as training does with `data.image.jpeg_scaling`."""

    def resized(self, size: Size, *, multiple: int, min_pixels: int, max_pixels: int) -> Size:
        """Size after resizing to multiples of `multiple` within the limits, in pixels."""


def open_image(image: ImageSource, decoder: ImageDecoder, size: Size | None = None) -> Any:
    """The image as training decodes it, in RGB, for the processor and for pages.

    Args:
        size: Height and width after resizing, as with `data.image.jpeg_scaling`; None: decode whole, do not resize.

    Raises:
        EvaluationError: The file cannot be read or decoded.
    """
    from PIL import Image

    if size is None:
        return Image.fromarray(_of_image(image, decoder.decode))
    return Image.fromarray(_of_image(image, lambda content: decoder.decode_scaled(content, size)))


def image_size(image: ImageSource, decoder: ImageDecoder) -> Size:
    """Height and width of an image as it is shown, from its header."""
    return _image_size(image, _version(image), decoder)


def image_hash(image: ImageSource) -> str:
    """SHA-256 of an image file."""
    return _image_hash(image, _version(image))


@lru_cache(maxsize=100_000)
def _image_size(image: ImageSource, modified_ns: int, decoder: ImageDecoder) -> Size:
    size: Size = _of_image(image, decoder.read_size)
    return size


@lru_cache(maxsize=100_000)
def _image_hash(image: ImageSource, modified_ns: int) -> str:
    digest: str = _of_image(image, lambda content: hashlib.sha256(content).hexdigest())
    return digest


def _version(image: ImageSource) -> int:
    """Changes when a file does; the bytes of an embedded image are part of its identity."""
    try:
        return 0 if isinstance(image, EmbeddedImage) else image.stat().st_mtime_ns
    except OSError:  # reading it names the problem
        return 0


def _of_image(image: ImageSource, read: Callable[[bytes], Any]) -> Any:
    try:
        return read(image.read_bytes())
    except OSError as error:
        raise EvaluationError(
            f"{image}: the image cannot be read ({error.strerror}). Replace the file or remove the item."
        ) from error
    except EvaluationError as error:
        raise EvaluationError(f"{image}: {error}. Replace the file or remove the item.") from error
