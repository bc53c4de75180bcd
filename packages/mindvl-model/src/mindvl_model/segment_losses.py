# SPDX-License-Identifier: Apache-2.0
"""Losses of a pack by segment, and what a model predicts for its labels: sums over the slice of this rank.

Comes after the output layer, on the last pipeline stage; metrics and validation add the sums of all ranks.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from mindvl_model.megatron.packing import IGNORE_INDEX


@dataclass(frozen=True, kw_only=True)
class PackPrediction:
    """Results of one pack on this rank; with context parallelism those of its slice."""

    by_segment: Tensor  # [3, num_segments] float32: summed loss, loss tokens, loss tokens that are the most likely ones
    tokens: Tensor  # [L] most likely token at the positions with a label


def losses_by_segment(losses: Tensor, labels: Tensor, cu_seqlens: Tensor, first: int = 0) -> Tensor:
    """Return the summed loss and the number of loss tokens [2, num_segments] (float32) of a slice of a pack.

    Args:
        losses: [T/cp], losses of the slice, which may end with padding added by the model.
        labels: [T], of the whole pack.
        cu_seqlens: [num_segments + 1], of the whole pack.
        first: Position of the first token of the slice.
    """
    has_loss = labels[first : first + len(losses)] != IGNORE_INDEX
    return _by_segment(torch.stack((losses[: len(has_loss)].float(), has_loss.float())), cu_seqlens, first, len(losses))


def pack_prediction(
    losses: Tensor, predicted: Tensor, labels: Tensor, cu_seqlens: Tensor, first: int
) -> PackPrediction:
    """The results of a slice; arguments as in losses_by_segment.

    Args:
        predicted: [T/cp] most likely tokens.
    """
    own = labels[first : first + len(losses)]
    has_loss, predicted = own != IGNORE_INDEX, predicted[: len(own)]
    # No prediction equals -100, the label of a token without loss.
    values = torch.stack((losses[: len(own)].float(), has_loss.float(), (predicted == own).float()))
    return PackPrediction(by_segment=_by_segment(values, cu_seqlens, first, len(losses)), tokens=predicted[has_loss])


def _by_segment(values: Tensor, cu_seqlens: Tensor, first: int, length: int) -> Tensor:
    """Sums [R, num_segments] of values [R, at most length] of a slice."""
    borders = [min(max(border - first, 0), length) for border in cu_seqlens.tolist()]  # cu_seqlens is on the host
    return torch.stack([values[:, start:end].sum(1) for start, end in pairwise(borders)], dim=1)
