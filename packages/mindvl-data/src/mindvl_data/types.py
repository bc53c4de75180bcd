# SPDX-License-Identifier: Apache-2.0
"""The stages of a sample in processing order: raw, parsed, tokenized, packed, batch.

Every other file of the package converts one of these into the next.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from mindvl_data.positions import PositionKind
from mindvl_data.preprocessing import WITHOUT_MODEL, Preprocessing
from mindvl_data.transformers_inputs import transformers_inputs

if TYPE_CHECKING:
    import torch

IGNORE_INDEX = -100
_ON_HOST = ("cu_seqlens", "image_grid_thw", "video_grid_thw", "loss_positions")

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True)
class MediaSize:
    """Size of an image or video, from the index."""

    height: int  # pixels, after EXIF rotation
    width: int
    frames: int = 0  # of a video; 0 for an image
    fps: float = 0.0  # frames per second of a video


@dataclass(frozen=True, kw_only=True)
class RawSample:
    """The bytes of one sample as stored in the shard, and the sizes of its media from the index."""

    key: str
    record: bytes  # KEY.json, or KEY.txt of a plain caption
    is_json: bool
    media: tuple[bytes, ...]  # images and videos in the order of their placeholders in the text
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

    image: int  # index of the image among the images of the sample, from 0
    values: tuple[float, ...]


Part = Text | Image | Video | Coordinates


@dataclass(frozen=True, kw_only=True)
class Message:
    role: Role
    parts: tuple[Part, ...]
    reasoning: str = ""  # `reasoning_content` of the assistant; its position is decided by the template
    tool_calls: tuple[dict[str, Any], ...] = ()  # of the assistant; rendered by the template


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The checked content of a record: either `messages` (chat) or `content` (no template)."""

    messages: tuple[Message, ...] = ()
    content: tuple[Part, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()  # descriptions of functions, for the chat template
    num_images: int
    num_videos: int = 0
    has_coordinates: bool
    min_pixels: int | None = None  # image limits of the sample; they override those of source and mixture
    max_pixels: int | None = None


@dataclass(frozen=True, kw_only=True)
class TokenizedSample:
    """One sample as model inputs, with shifted labels."""

    input_ids: NDArray[np.int64]  # [S]
    labels: NDArray[np.int64]  # [S]
    pixel_values: NDArray[np.uint8]  # [P, patch_dim]
    image_grid_thw: NDArray[np.int64]  # [num_images, 3]
    pixel_values_videos: NDArray[np.uint8]  # [P_videos, 2 * patch_dim]
    video_grid_thw: NDArray[np.int64]  # [num_videos, 3]
    seconds_per_grid: NDArray[np.float64]  # [num_videos], time between two steps of a video's grid


@dataclass(frozen=True, kw_only=True)
class SampleReference:
    """The origin of one sample of a pack."""

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
    """The samples of one packed sequence, in order, and their origins."""

    samples: tuple[TokenizedSample, ...]
    references: tuple[SampleReference, ...]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One packed sequence (pack): the inputs of one microbatch."""

    input_ids: "torch.Tensor"  # int64 [T]
    labels: "torch.Tensor"  # int64 [T], shifted inside each segment, IGNORE_INDEX where there is no loss
    position_ids: "torch.Tensor"  # int64 [3, T]
    cu_seqlens: "torch.Tensor"  # int32 [num_segments + 1]; padding is a separate last segment
    max_seqlen: int
    pixel_values: "torch.Tensor"  # uint8 [P, patch_dim], merge-block order
    image_grid_thw: "torch.Tensor"  # int64 [num_images, 3]
    pixel_values_videos: "torch.Tensor"  # uint8 [P_videos, 2 * patch_dim]; a patch: (channel, time, height, width)
    video_grid_thw: "torch.Tensor"  # int64 [num_videos, 3]
    loss_positions: "torch.Tensor"  # int64 [num_loss_tokens], positions of the labels
    samples: tuple[SampleReference, ...]  # in order, without the padding
    step: int  # the optimizer step this pack belongs to
    loader_state: dict[str, Any] | None = field(default=None, repr=False)  # set by PackedDataset for its state_dict
    seconds_per_grid: tuple[float, ...] = ()  # [num_videos], time between two steps of a video's grid

    def pin_memory(self) -> Self:
        """Return the pack with its tensors in pinned memory, from which copies to a device do not block."""
        return self._with(lambda tensor: tensor.pin_memory())

    def to(self, device: "torch.device | str") -> Self:
        """Return the pack with its tensors on `device`.

        cu_seqlens, the grids and loss_positions stay on the host: the model reads their values there, and copying them
        back would synchronize with the device several times per pack.
        """
        return self._with(lambda tensor: tensor.to(device, non_blocking=True))

    def _with(self, change: "Callable[[torch.Tensor], torch.Tensor]") -> Self:
        """Return the pack with changed tensors, except those that the model reads on the host."""
        import torch  # here, because reading and writing shards uses this module without torch

        changed: dict[str, Any] = {
            f.name: change(value)
            for f in fields(self)
            if f.name not in _ON_HOST and isinstance(value := getattr(self, f.name), torch.Tensor)
        }
        return replace(self, **changed)

    @property
    def num_loss_tokens(self) -> int:
        """Loss tokens of the pack."""
        return len(self.loss_positions)

    def model_inputs(self) -> dict[str, Any]:
        """Return the keyword arguments of the model's forward."""
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
            "loss_positions": self.loss_positions,
        }

    def to_transformers(
        self,
        *,
        num_loss_tokens: int | None = None,
        position_kind: PositionKind = "mrope",
        model: Preprocessing = WITHOUT_MODEL,
    ) -> dict[str, Any]:
        """Return the keyword arguments of a transformers model such as Qwen2.5-VL, on the device of `input_ids`.

        `model(**batch.to_transformers()).loss` is the loss of this pack. Samples of the pack do not attend to each
        other in any attention implementation (eager, sdpa, flash, flex), because transformers derives the segments
        from the text positions. The arguments disable the cache, whatever `model.config.use_cache` is.

        Args:
            num_loss_tokens: Divisor of the summed loss: the loss tokens of all packs of the optimizer step over all
                ranks, so that the losses of the packs sum to the mean. None: the loss tokens of this pack.
            position_kind: "mrope" for Qwen2-VL and Qwen2.5-VL, "mrope_frames" for Qwen3-VL (position_ids [4, 1, T]),
                "rope" for models that count tokens, such as an exported MindVL model (position_ids [1, T]). The loader
                must use the same kind.
            model: Preprocessing of the model; default: Qwen2.5-VL's.

        Returns:
            input_ids [1, T], labels [1, T] (not shifted, as transformers expects), position_ids, use_cache,
            num_items_in_batch; with media also float32 pixel_values [P, 2 * patch_dim] with image_grid_thw,
            pixel_values_videos [P_videos, 2 * patch_dim] with video_grid_thw.

        Raises:
            DataError: The batch has no pixels, or its positions are of another kind.
        """
        return transformers_inputs(
            self,
            num_loss_tokens=num_loss_tokens,
            position_kind=position_kind,
            model=model,
        )
