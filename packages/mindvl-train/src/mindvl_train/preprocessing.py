# SPDX-License-Identifier: Apache-2.0
"""The preprocessing that a vision encoder requires, in the form that the data package takes.

Comes between the configurations of model and data, which do not know each other.
"""

from mindvl_data.preprocessing import Preprocessing
from mindvl_model import VisionConfig


def preprocessing_of(vision: VisionConfig) -> Preprocessing:
    """Return patches, selection of frames and default limits of a vision encoder."""
    rule = vision.entry.video
    return Preprocessing(
        patch_size=vision.patch_size,
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
