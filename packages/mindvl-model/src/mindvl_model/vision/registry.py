# SPDX-License-Identifier: Apache-2.0
"""The registry of vision encoders: what an entry holds, and the entries by `kind`.

Comes before vision_config.py, which takes defaults from an entry. Everything that differs between encoders is data of
its entry: the layers, the merger, tensor names, preprocessing, and the keys and classes of transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class TensorNames:
    """Names of the tensors of a transformers directory, below `model.visual.`, without `.weight` and `.bias`."""

    patch_embedding: str
    norms: tuple[str, str]  # before attention and before the MLP, below blocks.N.
    qkv: str  # below blocks.N., as are the next two
    attention_output: str
    mlp: tuple[str, ...]  # gate, up and down of a gated MLP; else up and down
    merger: str
    merger_parts: tuple[str, str, str]  # norm and the two linear layers, below the merger
    position_embedding: str = ""
    extra_mergers: str = ""  # those of deepstack layers, followed by their number


@dataclass(frozen=True, kw_only=True)
class VideoRule:
    """How the processor of a model selects and resizes the frames of a video, and how the text shows them."""

    # stride: an even number of frames, each the first of an equal share; endpoints: any number of frames, equally spaced
    # from the first to the last.
    frames: Literal["stride", "endpoints"]
    # per_frame: the pixel limits are those of a frame; whole: those of all frames of the video.
    budget: Literal["per_frame", "whole"]
    timestamps: bool  # the time of each temporal patch precedes its visual tokens in the text
    fps: float  # frames taken per second
    min_frames: int
    max_frames: int
    min_tokens: int  # lower pixel limit, in areas of a visual token
    max_tokens: int  # upper pixel limit, of a frame or of the whole video
    total_tokens: int  # limit of the video with budget "per_frame"; a temporal patch counts once


@dataclass(frozen=True, kw_only=True)
class Published:
    """The classes and keys of transformers for an encoder."""

    model_type: str  # of vision_config in a MindVL directory, which selects the class of the encoder
    processor: str  # class of the processor of a whole model
    image_processor: str
    video_processor: str
    keys: Mapping[str, str]  # field of VisionConfig -> key of vision_config
    defaults: Mapping[str, Any]  # values of absent keys in transformers, by field
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # key -> the only supported values, default first


@dataclass(frozen=True, kw_only=True)
class VisionEntry:
    """A vision encoder. `defaults` are fields of VisionConfig; `absent` are fields it lacks, with their only value."""

    title: str  # in messages and documents
    norm: Literal["rms_norm", "layer_norm"]  # of the layers and the merger
    mlp: Literal["swiglu", "gelu_tanh"]  # gated, or two linear layers
    patch_bias: bool  # bias of the patch embedding
    defaults: Mapping[str, Any]
    absent: Mapping[str, Any]
    tensors: TensorNames
    video: VideoRule
    # Unit of points and boxes in texts. absolute: pixels of the resized image; relative: thousandths of its width and
    # height.
    coordinates: Literal["absolute", "relative"]
    published: Published

    @property
    def norm_bias(self) -> bool:
        """Whether norms have a bias."""
        return self.norm == "layer_norm"

    @property
    def gated(self) -> bool:
        """Whether the MLP is gated."""
        return self.mlp == "swiglu"
