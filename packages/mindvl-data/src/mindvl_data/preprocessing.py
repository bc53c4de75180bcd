# SPDX-License-Identifier: Apache-2.0
"""What a model requires of images and videos, as data: patches, the selection of frames and default limits.

Comes from the model, through the caller; config.py fills the fields that a recipe leaves out with it. Areas are counted
in visual tokens, so that they do not depend on the patch size.
"""

from dataclasses import dataclass
from typing import Any, Literal

# stride: an even number of frames, each the first of an equal share; endpoints: any number of frames, equally spaced from
# the first to the last.
FrameSelection = Literal["stride", "endpoints"]
# per_frame: pixel limits of a frame; whole: of all frames of a video together.
PixelBudget = Literal["per_frame", "whole"]
# absolute: pixels of the resized image; relative: thousandths of its width and height.
CoordinateUnit = Literal["absolute", "relative"]


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """The preprocessing of one model. The defaults, for callers without a model, are Qwen2.5-VL's."""

    patch_size: int = 14  # side of a patch in pixels
    temporal_patch_size: int = 2  # frames of a patch; an image fills all of them
    spatial_merge_size: int = 2  # side of the patch block that becomes one visual token
    # Normalization of pixels in [0, 1], by channel; that of CLIP (arXiv 2103.00020).
    image_mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    image_std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)
    coordinates: CoordinateUnit = "absolute"  # unit of points and boxes in texts
    min_image_tokens: int = 4
    max_image_tokens: int = 1280
    frames: FrameSelection = "stride"
    budget: PixelBudget = "per_frame"
    timestamps: bool = False  # the time of each temporal patch precedes its visual tokens in the text
    fps: float = 2.0  # frames taken per second
    min_frames: int = 4
    max_frames: int = 768
    min_video_tokens: int = 128  # of a frame, or of a video with budget "whole"
    max_video_tokens: int = 768  # of a frame, or of a video with budget "whole"
    total_video_tokens: int = 24_576  # of a video with budget "per_frame"; two frames share a patch

    @property
    def token_pixels(self) -> int:
        """Area of a visual token in pixels."""
        return (self.patch_size * self.spatial_merge_size) ** 2

    def image_fields(self, patch_size: int | None = None, spatial_merge_size: int | None = None) -> dict[str, Any]:
        """Default values of ImageConfig; the limits follow from the sizes that are given."""
        patch_size, merge = patch_size or self.patch_size, spatial_merge_size or self.spatial_merge_size
        pixels = (patch_size * merge) ** 2
        return {
            "patch_size": patch_size,
            "spatial_merge_size": merge,
            "coordinates": self.coordinates,
            "min_pixels": self.min_image_tokens * pixels,
            "max_pixels": self.max_image_tokens * pixels,
        }

    def video_fields(self) -> dict[str, Any]:
        """Default values of VideoConfig."""
        return {
            "frames": self.frames,
            "budget": self.budget,
            "timestamps": self.timestamps,
            "fps": self.fps,
            "min_frames": self.min_frames,
            "max_frames": self.max_frames,
            "min_pixels": self.min_video_tokens * self.token_pixels,
            "max_pixels": self.max_video_tokens * self.token_pixels,
            "total_pixels": self.total_video_tokens * self.token_pixels,
        }


WITHOUT_MODEL = Preprocessing()
