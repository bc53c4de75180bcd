# SPDX-License-Identifier: Apache-2.0
"""Batch -> the keyword arguments of a transformers model, so that a transformers training loop can use packs.

Comes after collate, for loops that do not use the mindvl model. Follows transformers 5.23
(Qwen2_5_VLTextModel.forward): packed samples are separated by their text positions, which start at 0 in each of them.
"""

from typing import TYPE_CHECKING, Any

from mindvl_data.errors import DataError
from mindvl_data.positions import PositionKind
from mindvl_data.preprocessing import Preprocessing

if TYPE_CHECKING:
    import torch

    from mindvl_data.types import Batch


def transformers_inputs(
    batch: "Batch",
    *,
    num_loss_tokens: int | None,
    position_kind: PositionKind,
    model: Preprocessing,
) -> dict[str, Any]:
    """See `Batch.to_transformers`."""
    device = batch.input_ids.device
    inputs: dict[str, Any] = {
        "input_ids": batch.input_ids[None],
        "labels": _unshifted(batch)[None],
        "position_ids": _positions(batch, position_kind, model),
        # With a cache, transformers does not detect packed samples and would attend across them.
        "use_cache": False,
        "num_items_in_batch": max(1, batch.num_loss_tokens if num_loss_tokens is None else num_loss_tokens),
    }
    media = (
        ("pixel_values", "image_grid_thw", 1),
        ("pixel_values_videos", "video_grid_thw", model.temporal_patch_size),
    )
    for pixels, grids, num_frames in media:
        patches, grid = getattr(batch, pixels), getattr(batch, grids)
        if len(patches) != int(grid.prod(-1).sum()):
            raise DataError(
                f"Batch.to_transformers: {pixels} has {len(patches)} patches, but {grids} requires "
                f"{int(grid.prod(-1).sum())}. Create the loader with with_pixels=True."
            )
        if len(grid):
            inputs[pixels] = _normalized(patches, num_frames, model)
            inputs[grids] = grid.to(device)
    return inputs


def _unshifted(batch: "Batch") -> "torch.Tensor":
    """Labels [T] at the position of the token itself; the last label of a sample is ignored, so none crosses samples."""
    return batch.labels.roll(1)


def _positions(batch: "Batch", kind: PositionKind, model: Preprocessing) -> "torch.Tensor":
    """int64 [4, 1, T], text positions before the three axes of M-RoPE, or [1, T] for a model without M-RoPE."""
    import torch  # here, because types.py uses this module without torch

    lengths = batch.cu_seqlens.diff().tolist()
    text = torch.cat([torch.arange(length) for length in lengths]).to(batch.input_ids.device)
    grids = torch.cat((batch.image_grid_thw, batch.video_grid_thw))
    # One visual token has the same position on every axis.
    if bool((grids.prod(-1) > model.spatial_merge_size**2).any()):
        loader_kind = "rope" if bool((batch.position_ids == text).all()) else "mrope"
        if (loader_kind == "rope") != (kind == "rope"):
            raise DataError(
                f"Batch.to_transformers: position_kind is {kind!r}, but the loader uses {loader_kind!r}. "
                f"Create the loader with position_kind={kind!r}."
            )
    return text[None] if kind == "rope" else torch.cat((text[None], batch.position_ids))[:, None]


def _normalized(patches: "torch.Tensor", num_frames: int, model: Preprocessing) -> "torch.Tensor":
    """Normalize uint8 patches to float32 [P, 3 * frames * patch area]; an image is copied to all frames of a patch."""
    pixels = patches.view(len(patches), 3, num_frames, -1).float() / 255
    means, stds = (pixels.new_tensor(list(values)).view(1, 3, 1, 1) for values in (model.image_mean, model.image_std))
    return ((pixels - means) / stds).expand(-1, -1, model.temporal_patch_size, -1).flatten(1)
