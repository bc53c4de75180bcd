# SPDX-License-Identifier: Apache-2.0
"""The forms of a sample, in the order in which it takes them: raw, parsed, tokenized, packed, batch.

Every other file of the package turns one of these into the next.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from mindvl_data.positions import PositionKind
from mindvl_data.transformers_inputs import IMAGE_MEAN, IMAGE_STD, transformers_inputs

if TYPE_CHECKING:
    import torch

IGNORE_INDEX = -100
_ON_HOST = ("cu_seqlens", "image_grid_thw", "video_grid_thw")

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True)
class MediaSize:
    """What the index knows of an image or video."""

    height: int  # pixels as shown
    width: int
    frames: int = 0  # of a video; 0 for an image
    fps: float = 0.0  # frames per second of a video


@dataclass(frozen=True, kw_only=True)
class RawSample:
    """The bytes of one sample, as they lie in the shard, and what the index knows of them."""

    key: str
    record: bytes  # KEY.json, or KEY.txt of a plain caption
    is_json: bool
    media: tuple[bytes, ...]  # images and videos in the order in which the text mentions them
    sizes: tuple[MediaSize, ...]  # of the media, in the same order


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Image:
    index: int  # into the sample's media


@dataclass(frozen=True)
class Video:
    index: int  # into the sample's media


@dataclass(frozen=True)
class Coordinates:
    """A point (x, y) or box (x1, y1, x2, y2) in pixels of the original image, EXIF orientation applied."""

    image: int  # number of the image, videos not counted
    values: tuple[float, ...]


Part = Text | Image | Video | Coordinates


@dataclass(frozen=True, kw_only=True)
class Message:
    role: Role
    parts: tuple[Part, ...]
    reasoning: str = ""  # `reasoning_content` of the assistant; the template decides where it stands
    tool_calls: tuple[dict[str, Any], ...] = ()  # of the assistant; the template writes them


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What a record says, checked. Exactly one of `messages` (chat) and `content` (no template) is filled."""

    messages: tuple[Message, ...] = ()
    content: tuple[Part, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()  # descriptions of functions, for the chat template
    num_images: int
    num_videos: int = 0
    has_coordinates: bool
    min_pixels: int | None = None  # the sample's own image limits; they go before those of source and mixture
    max_pixels: int | None = None


@dataclass(frozen=True, kw_only=True)
class TokenizedSample:
    """One sample as the model sees it; labels already shifted."""

    input_ids: NDArray[np.int64]  # [S]
    labels: NDArray[np.int64]  # [S]
    pixel_values: NDArray[np.uint8]  # [P, patch_dim]
    image_grid_thw: NDArray[np.int64]  # [num_images, 3]
    pixel_values_videos: NDArray[np.uint8]  # [P_videos, 2 * patch_dim]
    video_grid_thw: NDArray[np.int64]  # [num_videos, 3]
    seconds_per_grid: NDArray[np.float64]  # [num_videos], time between two steps of a video's grid


@dataclass(frozen=True, kw_only=True)
class SampleReference:
    """Where one part of a pack comes from."""

    source: str
    epoch: int
    shard: str
    sample_index: int  # position in the shard, from 0
    key: str
    length: int  # tokens
    num_images: int = 0
    num_videos: int = 0
    failed: bool = False  # could not be read or decoded; a placeholder without loss tokens takes its place


@dataclass(frozen=True, kw_only=True)
class PackedSample:
    """The samples of one pack, in order, with where they come from."""

    samples: tuple[TokenizedSample, ...]
    references: tuple[SampleReference, ...]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One packed pack: what the model takes as one microbatch."""

    input_ids: "torch.Tensor"  # int64 [T]
    labels: "torch.Tensor"  # int64 [T], shifted inside each segment, IGNORE_INDEX where nothing is learned
    position_ids: "torch.Tensor"  # int64 [3, T]
    cu_seqlens: "torch.Tensor"  # int32 [num_segments + 1]; padding is its own last segment
    max_seqlen: int
    pixel_values: "torch.Tensor"  # uint8 [P, patch_dim], merge-block order
    image_grid_thw: "torch.Tensor"  # int64 [num_images, 3]
    pixel_values_videos: "torch.Tensor"  # uint8 [P_videos, 2 * patch_dim]; a patch: (channel, time, pack, column)
    video_grid_thw: "torch.Tensor"  # int64 [num_videos, 3]
    num_loss_tokens: int
    samples: tuple[SampleReference, ...]  # in order, without the padding
    step: int  # the optimizer step this pack belongs to
    loader_state: dict[str, Any] | None = field(default=None, repr=False)  # set by PackedDataset, for its state_dict
    seconds_per_grid: tuple[float, ...] = ()  # [num_videos], time between two steps of a video's grid

    def to(self, device: "torch.device | str") -> Self:
        """The same pack with its tensors on `device`.

        cu_seqlens and the grids stay on the host: the model plans with their values there, and reading them back
        would make it wait for the device twice in every pack.
        """
        import torch  # here, because reading and writing shards uses this module without torch

        moved: dict[str, Any] = {
            f.name: value.to(device, non_blocking=True)
            for f in fields(self)
            if f.name not in _ON_HOST and isinstance(value := getattr(self, f.name), torch.Tensor)
        }
        return replace(self, **moved)

    def model_inputs(self) -> dict[str, Any]:
        """The keyword arguments of the model's forward."""
        return {
            "input_ids": self.input_ids,
            "labels": self.labels,
            "position_ids": self.position_ids,
            "cu_seqlens": self.cu_seqlens,
            "max_seqlen": self.max_seqlen,
            "pixel_values": self.pixel_values,
            "image_grid_thw": self.image_grid_thw,
            "pixel_values_videos": self.pixel_values_videos,
            "video_grid_thw": self.video_grid_thw,
        }

    def to_transformers(
        self,
        *,
        num_loss_tokens: int | None = None,
        position_kind: PositionKind = "mrope",
        image_mean: Sequence[float] = IMAGE_MEAN,
        image_std: Sequence[float] = IMAGE_STD,
    ) -> dict[str, Any]:
        """The keyword arguments of a transformers model, such as Qwen2.5-VL's, on the device of `input_ids`.

        The model returns the loss of this pack as `model(**batch.to_transformers()).loss`. Samples of the pack do not
        attend to each other with any attention implementation (eager, sdpa, flash, flex): transformers tells them
        apart by the text positions. Set `model.config.use_cache` as you like; the arguments turn the cache off.

        Args:
            num_loss_tokens: What the summed loss is divided by: the loss tokens of all packs of the optimizer step
                over all ranks, so that the losses of the packs add up to the mean; those of this pack when None.
            position_kind: "mrope" for Qwen2-VL and Qwen2.5-VL (position_ids [4, 1, T]), "rope" for models that count
                tokens, such as an exported MindVL model (position_ids [1, T]). The loader must use the same kind.
            image_mean, image_std: Of the model's processor; by default those of Qwen2.5-VL.

        Returns:
            input_ids [1, T], labels [1, T] as transformers has them (not shifted), position_ids, use_cache,
            num_items_in_batch, and where there are media float32 pixel_values [P, 2 * patch_dim] with image_grid_thw,
            pixel_values_videos [P_videos, 2 * patch_dim] with video_grid_thw.

        Raises:
            DataError: The batch has no pixels, or positions of the other kind.
        """
        return transformers_inputs(
            self,
            num_loss_tokens=num_loss_tokens,
            position_kind=position_kind,
            image_mean=image_mean,
            image_std=image_std,
        )
