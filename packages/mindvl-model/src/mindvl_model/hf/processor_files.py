# SPDX-License-Identifier: Apache-2.0
"""Write the processor files of an exported directory: tokenizer, chat template, image and video settings.

The settings are written as plain JSON, so that an export does not need torchvision, which the video processor imports.
"""

import json
import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from mindvl_model.config import VisionConfig
from mindvl_model.hf.image_processor import section_or_file

SHARE_OF_CAP = 0.9  # of the tokens of a video that the processor uses with cap_pixels_per_frame


@dataclass(frozen=True, kw_only=True)
class VideoSettings:
    """Frame sampling and resizing of videos in the exported processor; None: as published for the vision encoder."""

    fps: float | None = None  # sampled frames per second
    min_frames: int | None = None
    max_frames: int | None = None
    min_pixels: int | None = None  # per frame, or with budget "whole" per video
    max_pixels: int | None = None  # per frame, or with budget "whole" per video
    total_pixels: int | None = None  # per video with budget "per_frame"; a temporal patch of two frames counts once


@dataclass(frozen=True, kw_only=True)
class ProcessorSettings:
    """Resizing of images and videos in the exported processor."""

    min_pixels: int  # per image
    max_pixels: int  # per image
    # JPEGs were decoded at a fraction of their size in training; `mindvl eval` does the same.
    jpeg_scaling: bool = False
    # Unit of points and boxes in texts, which `mindvl eval` reads; None: as the vision encoder.
    coordinates: Literal["absolute", "relative"] | None = None
    video: VideoSettings = field(default_factory=VideoSettings)


def read_video_settings(path: Path, vision: VisionConfig) -> VideoSettings:
    """The video settings of an exported directory, from the files that `write_mindvl_processor` and the other function write.

    Limits of other directories have another meaning (`cap_pixels_per_frame`), so they are left out.

    Raises:
        WeightError: A file is damaged.
    """
    videos = section_or_file(path, "video_processor", "video_preprocessor_config.json")
    capped = vision.entry.video.budget == "per_frame"
    if videos is None or videos.values.get("cap_pixels_per_frame") is not capped:
        return VideoSettings()
    size = videos.section("size")
    found = {name: videos.number(name) for name in ("min_frames", "max_frames")}
    found |= {"min_pixels": size.number("shortest_edge"), "max_pixels": size.number("longest_edge")}
    if capped:
        found["total_pixels"] = int(videos.number("max_video_tokens") * SHARE_OF_CAP * _block(vision))
    return VideoSettings(fps=videos.number("fps", whole=False), **found)


def write_mindvl_processor(directory: Path, tokenizer: Path, settings: ProcessorSettings, vision: VisionConfig) -> None:
    """Write the tokenizer and processor_config.json for the MindVLProcessor in the remote code."""
    _write_tokenizer(directory, tokenizer)
    published = vision.entry.published
    document = {
        "auto_map": {"AutoProcessor": "processing_mindvl.MindVLProcessor"},
        "processor_class": "MindVLProcessor",
        "image_processor": _images(settings, vision) | {"image_processor_type": published.image_processor},
        "video_processor": _videos(settings, vision) | {"video_processor_type": published.video_processor},
    }
    _write(directory / "processor_config.json", document)


def write_published_processor(
    directory: Path, tokenizer: Path, settings: ProcessorSettings, vision: VisionConfig
) -> None:
    """Write the tokenizer and the two configuration files of the processor of the whole model, as published."""
    _write_tokenizer(directory, tokenizer)
    published = vision.entry.published
    named = {"processor_class": published.processor}
    images = {
        # The keys of published directories, which older tools need.
        "min_pixels": settings.min_pixels,
        "max_pixels": settings.max_pixels,
        "image_processor_type": published.image_processor,
    }
    _write(directory / "preprocessor_config.json", _images(settings, vision) | images | named)
    videos = _videos(settings, vision) | {"video_processor_type": published.video_processor}
    _write(directory / "video_preprocessor_config.json", videos | named)


def _images(settings: ProcessorSettings, vision: VisionConfig) -> dict[str, Any]:
    unit = settings.coordinates
    return _patches(vision) | {
        "size": {"shortest_edge": settings.min_pixels, "longest_edge": settings.max_pixels},
        **({"jpeg_scaling": True} if settings.jpeg_scaling else {}),
        **({"coordinates": unit} if unit not in (None, vision.entry.coordinates) else {}),
    }


def _videos(settings: ProcessorSettings, vision: VisionConfig) -> dict[str, Any]:
    rule, block = vision.entry.video, _block(vision)
    video: dict[str, Any] = {
        "fps": rule.fps,
        "min_frames": rule.min_frames,
        "max_frames": rule.max_frames,
        "min_pixels": rule.min_tokens * block,
        "max_pixels": rule.max_tokens * block,
        "total_pixels": rule.total_tokens * block,
    }
    given = {one.name: getattr(settings.video, one.name) for one in fields(VideoSettings)}
    video |= {name: value for name, value in given.items() if value is not None}
    capped = rule.budget == "per_frame"
    cap = {"max_video_tokens": math.ceil(video["total_pixels"] / block / SHARE_OF_CAP)} if capped else {}
    return _patches(vision) | {
        "size": {"shortest_edge": video["min_pixels"], "longest_edge": video["max_pixels"]},
        "do_sample_frames": True,
        "fps": video["fps"],
        "min_frames": video["min_frames"],
        "max_frames": video["max_frames"],
        "cap_pixels_per_frame": capped,
        **cap,
    }


def _block(vision: VisionConfig) -> int:
    """Area of a visual token in pixels."""
    return (vision.patch_size * vision.spatial_merge_size) ** 2


def _patches(vision: VisionConfig) -> dict[str, Any]:
    return {
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "merge_size": vision.spatial_merge_size,
        "image_mean": list(vision.image_mean),
        "image_std": list(vision.image_std),
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "resample": 3,  # bicubic
        "rescale_factor": 1 / 255,
    }


def _write_tokenizer(directory: Path, tokenizer: Path) -> None:
    from transformers import AutoTokenizer

    # An exported directory has remote code that its tokenizer does not need; with None transformers asks the user.
    loaded = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True, trust_remote_code=False)
    loaded.save_pretrained(directory)


def _write(file: Path, document: dict[str, Any]) -> None:
    file.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
