# SPDX-License-Identifier: Apache-2.0
"""Sizes of a vision encoder; `kind` selects its entry in the registry (vision/entries.py).

Part of the configuration of a model (config.py). Fields without a value take the default of the entry.
"""

from dataclasses import dataclass
from typing import Any, Literal

from mindvl_model.errors import ModelError
from mindvl_model.language_config import MAX_LAYERS, MAX_SIZE, check_range
from mindvl_model.vision.entries import DEFAULT_KIND, VISION_ENTRIES
from mindvl_model.vision.registry import VisionEntry

VisionKind = Literal["qwen2_5_vl", "qwen3_vl"]

_OF_KIND: Any = None  # the default is that of the entry


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """A vision transformer. The projector merges spatial_merge_size**2 neighbouring patches."""

    kind: VisionKind = DEFAULT_KIND  # type: ignore[assignment]  # Vision encoder; sets the defaults of this section.
    hidden_size: int  # width of the layers
    num_layers: int  # transformer layers
    num_heads: int  # attention heads
    ffn_hidden_size: int  # width inside the MLP
    # Layer indices, from 0; the other layers use window attention. Default: all layers if the kind has no windows.
    full_attention_layers: tuple[int, ...] = _OF_KIND
    # Side of an attention window in pixels; a multiple of patch_size * spatial_merge_size; 0: no windows.
    window_size: int = _OF_KIND
    patch_size: int = _OF_KIND  # side of a patch in pixels
    temporal_patch_size: int = 2  # frames of a patch; only 2 is supported
    spatial_merge_size: int = 2  # side of the block of patches that becomes one visual token
    in_channels: int = 3  # color channels; only 3 is supported
    # Rows of the learned position embedding, a square grid that is interpolated to the size of each image; 0: none.
    num_position_embeddings: int = _OF_KIND
    # Layer indices, from 0, whose outputs are also merged; the first of them is added to the visual tokens after the first
    # layer of the language model, and so on.
    deepstack_layers: tuple[int, ...] = _OF_KIND
    rotary_base: float = 10000.0  # base of the rotary position embedding
    norm_epsilon: float = 1e-6  # epsilon of the norms
    image_mean: tuple[float, float, float] = _OF_KIND  # mean per channel for pixels in [0, 1]
    image_std: tuple[float, float, float] = _OF_KIND  # standard deviation per channel for pixels in [0, 1]
    init_std: float | None = 0.02  # standard deviation of initial weights; None: 1 / sqrt(fan_in), for small models

    def __post_init__(self) -> None:
        self._take_defaults()
        check_range(self, 1, MAX_SIZE, "hidden_size", "num_heads", "ffn_hidden_size")
        check_range(self, 0, MAX_SIZE, "window_size", "num_position_embeddings")
        check_range(self, 1, MAX_LAYERS, "num_layers")
        check_range(self, 1, 1024, "patch_size", "temporal_patch_size", "spatial_merge_size")
        check_range(self, 1.0, 1e30, "rotary_base")
        check_range(self, 0.0, 1.0, "norm_epsilon")
        check_range(self, 0.0, 1e3, "init_std")
        if self.temporal_patch_size != 2:
            raise ModelError(
                f"temporal_patch_size: must be 2 (a video patch covers two frames), got {self.temporal_patch_size}. "
                "Use 2."
            )
        if self.in_channels != 3:
            raise ModelError(f"in_channels: must be 3, because images are RGB, got {self.in_channels}. Use 3.")
        if not min(self.image_std) > 0:
            raise ModelError(f"image_std: must be above 0, got {list(self.image_std)}. Use three positive numbers.")
        if self.hidden_size % self.num_heads or (self.hidden_size // self.num_heads) % 4:
            raise ModelError(
                f"hidden_size: must be num_heads times a multiple of 4 (for two rotary axes), got {self.hidden_size} "
                f"with num_heads={self.num_heads}. Change one of them."
            )
        self._check_layers("full_attention_layers", "deepstack_layers")
        if self.window_size % (self.patch_size * self.spatial_merge_size):
            raise ModelError(
                f"window_size: must be a multiple of patch_size * spatial_merge_size = "
                f"{self.patch_size * self.spatial_merge_size} pixels, got {self.window_size}. Use a multiple."
            )
        if self.entry.tensors.position_embedding and not self.num_position_embeddings:
            raise ModelError(
                f"num_position_embeddings: must be at least 1 for {self.entry.title}, got 0. Use for example 2304."
            )

    @property
    def entry(self) -> VisionEntry:
        """The entry of the registry."""
        return VISION_ENTRIES[self.kind]

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def windowed(self) -> bool:
        """Whether a layer uses window attention."""
        return len(self.full_attention_layers) < self.num_layers

    def _take_defaults(self) -> None:
        if self.kind not in VISION_ENTRIES:
            raise ModelError(f"kind: {self.kind!r:.60} is unknown. Use one of {', '.join(VISION_ENTRIES)}.")
        for name, value in {**self.entry.defaults, **self.entry.absent}.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        for name, value in self.entry.absent.items():
            if getattr(self, name) != value:
                raise ModelError(
                    f"{name}: {self.entry.title} does not have it, so it must be {value}, got {getattr(self, name)}. "
                    "Remove it."
                )
        if self.full_attention_layers is None:
            if self.window_size:
                raise ModelError(
                    f"full_attention_layers: is required for {self.entry.title}, whose other layers use window "
                    "attention. Give the layer indices, such as [7, 15, 23, 31]."
                )
            object.__setattr__(self, "full_attention_layers", tuple(range(self.num_layers)))
        if not self.window_size and self.windowed:
            raise ModelError(
                f"full_attention_layers: must be all {self.num_layers} layers, because window_size is 0, got "
                f"{list(self.full_attention_layers)}. Remove it."
            )

    def _check_layers(self, *names: str) -> None:
        for name in names:
            layers: tuple[int, ...] = getattr(self, name)
            outside = [layer for layer in layers if not 0 <= layer < self.num_layers]
            if outside:
                raise ModelError(
                    f"{name}: layers {outside} do not exist in a vision encoder with num_layers={self.num_layers}. "
                    "Remove them."
                )
        if len(set(self.deepstack_layers)) != len(self.deepstack_layers):
            raise ModelError(
                f"deepstack_layers: must be different layers, got {list(self.deepstack_layers)}. Remove the repeated ones."
            )
