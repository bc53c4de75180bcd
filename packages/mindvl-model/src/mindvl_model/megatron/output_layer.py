# SPDX-License-Identifier: Apache-2.0
"""The output layer with the loss: only tokens that may have a label are multiplied by the vocabulary.

Comes after the final norm, on the last pipeline stage. The number of rows is computed on the host from the positions of
the loss tokens, so that the host does not wait for the device; the rows themselves are found on the device.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, gather_from_sequence_parallel_region
from torch import Tensor

import mindvl_ops as ops
from mindvl_model.megatron.packing import IGNORE_INDEX, PackedSequence
from mindvl_ops.vocabulary import WHOLE, VocabularyShard

# The number of rows is a multiple of this: matrix products are faster and an allocator meets fewer different sizes.
# At least one multiple is computed, so that every rank takes part in every collective and every weight has a gradient.
_ROW_MULTIPLE = 16
_PREDICTED_ROWS = 1024  # whose logits are in memory at once while tokens are predicted


class OutputLayer(ColumnParallelLinear):
    """Output layer of megatron-core, which also computes the loss.

    The loss is computed inside `forward` because data parallelism waits for gathered weights in hooks of modules.

    Attributes:
        predicts: Whether `forward` with labels also stores `predicted`; set it only where no gradients are computed.
        predicted: [T/cp], id of the most likely token at each position that was multiplied by the vocabulary, otherwise -1.
    """

    predicts = False
    predicted: Tensor | None = None

    def forward(
        self,
        hidden_states: Tensor,
        weight: Tensor | None = None,
        labels: Tensor | None = None,
        num_rows: int | None = None,
        **given: Any,
    ) -> Any:
        """Without labels as in megatron-core; with labels the loss of each token [T/cp], 0 without a label.

        Args:
            hidden_states: [T/(cp*tp), 1, H].
            weight: [V/tp, H] of tied embeddings; None: the weight of this layer.
            labels: [T/cp], -100 where there is no loss.
            num_rows: Number of tokens to multiply by the vocabulary, those with a label first; None: all.
            given: Further arguments of megatron-core.
        """
        if labels is None:
            return super().forward(hidden_states, weight=weight, **given)
        weight = self.weight if weight is None else weight
        sharded = self.tp_group.size() > 1
        if sharded:  # the gradient of each rank is its part of the sum, because the vocabulary is split
            hidden_states = gather_from_sequence_parallel_region(hidden_states, group=self.tp_group)
        hidden_states = hidden_states.squeeze(1)
        if num_rows is None:
            if self.predicts:
                self.predicted = self._most_likely(hidden_states, weight)
            return self._losses(hidden_states, weight, labels)
        # A stable sort moves labels to the front; nonzero would make the host wait for the count. NPUs sort floats.
        rows = (labels == IGNORE_INDEX).float().argsort(stable=True)[:num_rows]
        chosen = hidden_states.index_select(0, rows)
        losses = self._losses(chosen, weight, labels.index_select(0, rows))
        if self.predicts:
            predicted = self._most_likely(chosen, weight)
            self.predicted = predicted.new_full((len(labels),), -1).index_copy(0, rows, predicted)
        return losses.new_zeros(len(labels)).index_copy(0, rows, losses)

    def _shard(self, weight: Tensor) -> VocabularyShard:
        return VocabularyShard.of_group(len(weight), self.tp_group) if self.tp_group.size() > 1 else WHOLE

    def _most_likely(self, hidden_states: Tensor, weight: Tensor) -> Tensor:
        """[rows, H] -> ids [rows] of the largest logits over all ranks; of equal ones the lowest id, as argmax does."""
        shard, pieces = self._shard(weight), []
        for piece in hidden_states.split(_PREDICTED_ROWS):
            largest, ids = F.linear(piece, weight).max(dim=-1)
            is_largest = largest == shard.maximum(largest)
            # Negated, because ranks exchange maxima only; int32, which every backend reduces.
            negated = torch.where(is_largest, -(ids + shard.start), torch.iinfo(torch.int32).min).to(torch.int32)
            pieces.append(-shard.maximum(negated))
        return torch.cat(pieces).long()

    def _losses(self, hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        shard = self._shard(weight)
        if self.config.recompute_granularity is None:
            return ops.cross_entropy(F.linear(hidden_states, weight), labels, shard=shard)
        # Activation recomputation includes the logits: they are made in pieces, and again in the backward pass.
        return ops.linear_cross_entropy(hidden_states, weight, labels, shard=shard)


def num_loss_rows(pack: PackedSequence, steps: int = 0) -> int | None:
    """Return how many tokens of this rank's slice the output layer computes; None: all of them.

    Args:
        pack: The packed sequence; without `loss_positions` all tokens are computed.
        steps: Shift of the labels inside each segment, for multi-token prediction.
    """
    if pack.loss_positions is None:
        return None
    assert pack.segments is not None
    positions, segments = pack.loss_positions, pack.segments
    if steps:
        bounds = segments.cu_seqlens(positions.device).long()
        starts = bounds[torch.searchsorted(bounds, positions, right=True) - 1]
        positions = positions[positions - steps >= starts] - steps
    length = segments.total // pack.cp_size
    first = pack.cp_rank * length
    count = int(((positions >= first) & (positions < first + length)).sum())
    rows = max(1, -(-count // _ROW_MULTIPLE)) * _ROW_MULTIPLE
    return None if rows >= length else rows


def check_loss_positions(loss_positions: Tensor, labels: Tensor) -> None:
    """Check that `loss_positions` lists the labels, without making the host wait for a device (not checked on NPUs).

    Fewer positions than labels would silently drop the loss of the others.
    """
    if labels.device.type == "npu":
        return
    has_loss = labels != IGNORE_INDEX
    if labels.device.type == "cpu":
        assert torch.equal(has_loss.nonzero().squeeze(1), loss_positions), "loss_positions do not match the labels"
    else:
        torch._assert_async(has_loss.sum() == len(loss_positions))
