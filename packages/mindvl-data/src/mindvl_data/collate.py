# SPDX-License-Identifier: Apache-2.0
"""PackedSample -> Batch: the samples of a pack end to end, with lengths, positions and padding.

Comes after packing, before the model.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mindvl_data.errors import DataError
from mindvl_data.positions import MediaGrids, PositionKind, segment_positions
from mindvl_data.types import IGNORE_INDEX, Batch, PackedSample


def collate(
    packed: PackedSample,
    *,
    step: int,
    position_kind: PositionKind,
    pad_id: int,
    image_pad_id: int,
    video_pad_id: int | None,
    pad_multiple: int,
    patch_dim: int,
    spatial_merge_size: int,
    pixel_values: NDArray[np.uint8] | None = None,
    vocab_size: int | None = None,
) -> Batch:
    """Build the tensors of a pack; padding to `pad_multiple` is a separate segment without loss tokens.

    A pack without samples is one segment of padding.

    Args:
        pixel_values: The patches of the images of all samples if they are already concatenated.
        vocab_size: Number of rows of the model's embedding; None: only negative ids are refused.

    Raises:
        DataError: An id in input_ids or labels lies outside the vocabulary; in labels IGNORE_INDEX is allowed. The
            operators do not check ids: such a label gives a finite loss, and such an id another token's embedding.
    """
    lengths = [len(sample.input_ids) for sample in packed.samples]
    total = sum(lengths)
    padding = -total % pad_multiple if total else pad_multiple
    input_ids = np.full(total + padding, pad_id, np.int64)
    labels = np.full(total + padding, IGNORE_INDEX, np.int64)
    positions = np.empty((3, total + padding), np.int64)
    positions[:, total:] = np.arange(padding)
    start = 0
    for sample, length in zip(packed.samples, lengths, strict=True):
        stop = start + length
        input_ids[start:stop] = sample.input_ids
        labels[start:stop] = sample.labels
        positions[:, start:stop] = segment_positions(
            sample.input_ids,
            MediaGrids(
                images=sample.image_grid_thw,
                videos=sample.video_grid_thw,
                seconds_per_grid=sample.seconds_per_grid.tolist(),
            ),
            kind=position_kind,
            image_pad_id=image_pad_id,
            video_pad_id=video_pad_id,
            spatial_merge_size=spatial_merge_size,
        )
        start = stop
    if padding:
        lengths.append(padding)
    _check_ids("input_ids", input_ids, vocab_size, packed, step)
    _check_ids("labels", labels[labels != IGNORE_INDEX], vocab_size, packed, step)
    return Batch(
        input_ids=torch.from_numpy(input_ids),
        labels=torch.from_numpy(labels),
        position_ids=torch.from_numpy(positions),
        cu_seqlens=torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)),
        max_seqlen=max(lengths),
        pixel_values=(
            _end_to_end([s.pixel_values for s in packed.samples], patch_dim)
            if pixel_values is None
            else torch.from_numpy(pixel_values)
        ),
        image_grid_thw=_end_to_end([s.image_grid_thw for s in packed.samples], 3),
        pixel_values_videos=_end_to_end([s.pixel_values_videos for s in packed.samples], 2 * patch_dim),
        video_grid_thw=_end_to_end([s.video_grid_thw for s in packed.samples], 3),
        loss_positions=torch.from_numpy(np.flatnonzero(labels != IGNORE_INDEX)),
        samples=packed.references,
        step=step,
        seconds_per_grid=tuple(float(value) for s in packed.samples for value in s.seconds_per_grid),
    )


def _check_ids(name: str, ids: NDArray[np.int64], vocab_size: int | None, packed: PackedSample, step: int) -> None:
    if not len(ids) or (ids.min() >= 0 and (vocab_size is None or ids.max() < vocab_size)):
        return
    lowest, highest = int(ids.min()), int(ids.max())
    sources = ", ".join(sorted({reference.source for reference in packed.references})) or "unknown"
    size = "" if vocab_size is None else f" of {vocab_size} tokens"
    raise DataError(
        f"step {step}: {name} of a pack hold token {lowest if lowest < 0 else highest}, which lies outside the model's "
        f"vocabulary{size} (sources of the pack: {sources}). Use the tokenizer that the model was made with, or a "
        "model whose vocabulary holds all of its tokens."
    )


def _end_to_end(parts: list[NDArray[Any]], width: int) -> torch.Tensor:
    if not parts:  # patches are bytes, and no patch has three values
        parts = [np.zeros((0, width), np.int64 if width == 3 else np.uint8)]
    return torch.from_numpy(np.concatenate(parts))
