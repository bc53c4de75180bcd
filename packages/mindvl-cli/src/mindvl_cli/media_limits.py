# SPDX-License-Identifier: Apache-2.0
"""Image and video settings of `mindvl data` from its options, with the defaults of the model in the tokenizer directory."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mindvl_data import ImageConfig, VideoConfig


def media_configs(
    directory: Path | None, *, min_pixels: int | None, max_pixels: int | None, fps: float | None = None
) -> "tuple[ImageConfig, VideoConfig]":
    """Settings of images and videos.

    Args:
        directory: Model or tokenizer directory; without a vision encoder in it, the defaults are Qwen2.5-VL's.
        min_pixels, max_pixels: Limits of the image area; None: those of the model.
        fps: Frames taken per second; None: as the model.

    Raises:
        DataError: The limits allow no image size, or the rate no number of frames.
        ModelError: The vision encoder of the directory is not supported.
    """
    from mindvl_data import DataError, ImageConfig, VideoConfig
    from mindvl_data.preprocessing import WITHOUT_MODEL

    model = WITHOUT_MODEL
    if directory is not None and (directory / "config.json").is_file():  # the import takes seconds
        from mindvl_train.preprocessing import directory_preprocessing

        model = directory_preprocessing(directory)
    limits = {"min_pixels": min_pixels, "max_pixels": max_pixels}
    images = model.image_fields() | {name: value for name, value in limits.items() if value is not None}
    videos = model.video_fields() | ({} if fps is None else {"fps": fps})
    try:
        return ImageConfig(**images), VideoConfig(**videos)
    except ValueError as error:
        raise DataError(str(error)) from error
