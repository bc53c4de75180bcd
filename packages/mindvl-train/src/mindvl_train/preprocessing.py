# SPDX-License-Identifier: Apache-2.0
"""The preprocessing that a vision encoder requires, in the form that the data package takes.

Comes between the configurations of model and data, which do not know each other.
"""

from pathlib import Path

from mindvl_data.preprocessing import WITHOUT_MODEL, Preprocessing
from mindvl_model import VisionConfig
from mindvl_model.hf.vision_json import directory_encoder


def directory_preprocessing(directory: Path) -> Preprocessing:
    """Return the preprocessing of the model in a directory; of one without a vision encoder, such as a tokenizer, Qwen2.5-VL's.

    Raises:
        ModelError: The vision encoder is not supported.
    """
    vision = directory_encoder(directory)
    return WITHOUT_MODEL if vision is None else preprocessing_of(vision)


def preprocessing_of(vision: VisionConfig) -> Preprocessing:
    """Return patches, selection of frames and default limits of a vision encoder."""
    rule = vision.entry.video
    return Preprocessing(
        patch_size=vision.patch_size,
        temporal_patch_size=vision.temporal_patch_size,
        image_mean=vision.image_mean,
        image_std=vision.image_std,
        coordinates=vision.entry.coordinates,
        spatial_merge_size=vision.spatial_merge_size,
        frames=rule.frames,
        budget=rule.budget,
        timestamps=rule.timestamps,
        fps=rule.fps,
        min_frames=rule.min_frames,
        max_frames=rule.max_frames,
        min_video_tokens=rule.min_tokens,
        max_video_tokens=rule.max_tokens,
        total_video_tokens=rule.total_tokens,
    )
