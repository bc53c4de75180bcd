# SPDX-License-Identifier: Apache-2.0
"""The vision transformer on megatron-core layers; the registry has what differs between encoders.

From the uint8 patches of a batch to the input of the projector. Images keep their resolution and are packed into one
sequence; patch embedding is a matmul with the Conv3d kernel (paper, section 3.1.4).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import mindvl_ops as ops
from mindvl_model.config import VisionConfig
from mindvl_model.errors import ModelError
from mindvl_model.megatron.blocks import (
    MegatronModule,
    PackedSequence,
    build_vision_block,
    run_layers,
    transformer_config,
)
from mindvl_model.parallel_config import BuildConfig
from mindvl_model.vision.positions import PatchOrder, rotary_angles


class PatchEmbedding(torch.nn.Module):
    """Normalize uint8 patches and embed them by a matmul with the Conv3d kernel.

    A separate module, because forward pre-hooks that wait for the parameters of a module must cover the kernel.
    """

    pixel_scale: Tensor
    pixel_shift: Tensor

    def __init__(self, config: VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.vision = config
        patch_dim = config.in_channels * config.temporal_patch_size * config.patch_size**2
        self.weight = torch.nn.Parameter(torch.empty(config.hidden_size, patch_dim, dtype=dtype))
        mean = torch.tensor(config.image_mean).repeat_interleave(config.patch_size**2)
        std = torch.tensor(config.image_std).repeat_interleave(config.patch_size**2)
        self.bias = (
            torch.nn.Parameter(torch.empty(config.hidden_size, dtype=dtype)) if config.entry.patch_bias else None
        )
        self.register_buffer("pixel_scale", 1 / (255 * std), persistent=False)
        self.register_buffer("pixel_shift", -mean / std, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PatchEmbedding":
        """Move and convert, but keep the normalization constants in float32: 16 bits would shift all pixel values."""
        exact = {"pixel_scale": self.pixel_scale, "pixel_shift": self.pixel_shift}
        super()._apply(fn, recurse)
        for name, values in exact.items():
            moved = getattr(self, name)
            if moved.dtype != values.dtype:
                setattr(self, name, values.to(moved.device))
        return self

    def forward(self, pixel_values: Tensor, pixel_values_videos: Tensor | None = None) -> Tensor:
        """[P_images, C*patch*patch] and [P_videos, C*temporal_patch*patch*patch] -> [P_images + P_videos, H]."""
        hidden = self._embed(pixel_values)
        if pixel_values_videos is not None and len(pixel_values_videos):
            hidden = torch.cat((hidden, self._embed_videos(pixel_values_videos)))
        return hidden if self.bias is None else hidden + self.bias

    def _embed(self, pixel_values: Tensor) -> Tensor:
        """Embed images with the kernel summed over time, which equals repeating the image and takes half the FLOPs."""
        config, weight = self.vision, self.weight
        if pixel_values.shape[-1] != config.in_channels * config.patch_size**2:
            raise ModelError(
                f"pixel_values: patches must have {config.in_channels} x {config.patch_size} x {config.patch_size} "
                f"values, got {pixel_values.shape[-1]}. Use the image settings of this model."
            )
        pixels = torch.addcmul(self.pixel_shift, pixel_values.float(), self.pixel_scale)
        over_time = weight.view(-1, config.in_channels, config.temporal_patch_size, config.patch_size**2).sum(2)
        kernel = (config.in_channels, config.patch_size, config.patch_size)
        return ops.patch_embed(pixels.to(weight.dtype), over_time.reshape(weight.shape[0], -1), kernel=kernel)

    def _embed_videos(self, pixel_values_videos: Tensor) -> Tensor:
        config, weight = self.vision, self.weight
        if pixel_values_videos.shape[-1] != weight.shape[1]:
            raise ModelError(
                f"pixel_values_videos: patches must have {config.in_channels} x {config.temporal_patch_size} x "
                f"{config.patch_size} x {config.patch_size} values, got {pixel_values_videos.shape[-1]}. Use the video "
                "settings of this model."
            )
        shift, scale = (b.view(config.in_channels, 1, -1) for b in (self.pixel_shift, self.pixel_scale))
        pixels = pixel_values_videos.float().view(-1, config.in_channels, config.temporal_patch_size, shift.shape[-1])
        kernel = (config.in_channels, config.temporal_patch_size, config.patch_size, config.patch_size)
        return ops.patch_embed(torch.addcmul(shift, pixels, scale).flatten(1).to(weight.dtype), weight, kernel=kernel)


class PositionEmbedding(torch.nn.Module):
    """A learned embedding of positions in a square grid, interpolated to the grids of the images."""

    def __init__(self, config: VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(config.num_position_embeddings, config.hidden_size, dtype=dtype))

    def forward(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Rows of the embedding [P, 4] and their weights [P, 4] -> weighted sums [P, H] in float32."""
        parts = [F.embedding(rows[:, corner], self.weight) * weights[:, corner, None] for corner in range(4)]
        return parts[0] + parts[1] + parts[2] + parts[3]


class VisionEncoder(MegatronModule):
    """The transformer: patches -> hidden states, ordered by window."""

    def __init__(self, config: VisionConfig, build_config: BuildConfig) -> None:
        block_config = transformer_config(
            build_config.for_vision,
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_heads,
            ffn_hidden_size=config.ffn_hidden_size,
            gated_linear_unit=config.entry.gated,
            layernorm_epsilon=config.norm_epsilon,
            add_bias_linear=True,
            sequence_parallel=False,
        )
        super().__init__(config=block_config)
        self.vision = config
        self.patch_embed = PatchEmbedding(config, build_config.dtype)
        learned = config.num_position_embeddings > 0
        self.position_embedding = PositionEmbedding(config, build_config.dtype) if learned else None
        self.blocks = build_vision_block(block_config, config.entry, whole=bool(build_config.parallel.spread_images))

    def forward(self, pixel_values: Tensor, order: PatchOrder, pixel_values_videos: Tensor | None = None) -> Tensor:
        """Return hidden states [P, H] in the given order, of images followed by videos.

        With D deepstack layers, the outputs of these follow in ascending order along the last axis, [P, (1 + D)*H].

        Args:
            pixel_values: uint8 [P_images, C*patch*patch], in merge-block order.
            order: Order of the patches of all images and videos.
            pixel_values_videos: uint8 [P_videos, C*temporal_patch*patch*patch], in merge-block order.
        """
        hidden: Tensor = self.patch_embed(pixel_values, pixel_values_videos)
        merge_unit = self.vision.spatial_merge_size**2
        if order.order is not None:
            block_order = ops.to_device(order.order, hidden.device)
            hidden = hidden.view(-1, merge_unit, hidden.shape[-1])[block_order].view(hidden.shape)
        if self.position_embedding is not None:
            assert order.rows is not None
            assert order.row_weights is not None
            rows, weights = (ops.to_device(one, hidden.device) for one in (order.rows, order.row_weights))
            hidden = hidden + self.position_embedding(rows, weights).to(hidden.dtype)
        positions = ops.to_device(order.positions, hidden.device)
        cos, sin = rotary_angles(positions, self.vision.head_dim, self.vision.rotary_base)
        pack = PackedSequence(
            segments=order.windows,
            segments_by_layer={layer + 1: order.full for layer in self.vision.full_attention_layers},
            cos=cos,
            sin=sin,
        )
        hidden = hidden.unsqueeze(1)  # [P, 1, H] inside
        if not self.vision.deepstack_layers:
            return self.blocks(hidden, None, packed_seq_params=pack).squeeze(1)
        outputs = run_layers(self.blocks, hidden, pack, outputs_of=self.vision.deepstack_layers)
        return torch.cat((outputs[-1], *outputs[:-1]), dim=-1).squeeze(1)
