# SPDX-License-Identifier: Apache-2.0
"""One optimizer update: microbatches, forward, backward, clip, update.

Comes after the loader, inside the loop. The loss stays on the device until metrics.py asks for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mindvl_train.errors import TrainError
from mindvl_train.interfaces import Batch, BatchSource
from mindvl_train.megatron.optimizer import update
from mindvl_train.megatron.pipeline import finish_router_step, forward_backward
from mindvl_train.parallel import Place


@dataclass(frozen=True)
class StepReport:
    """What one update did on this rank. Sums over all ranks count every row once, in any layout."""

    loss_sum: Tensor  # over learned tokens: of what this rank computed, 0 where a peer says it
    num_label_tokens: int  # learned tokens of this rank's rows; 0 where a peer that trains the same rows says it
    grad_norm: float  # over all ranks, before clipping
    learning_rate: float
    num_tokens: int  # tokens of this rank's rows, padding included; 0 where a peer says it
    num_patches: int  # image patches of this rank's rows; 0 where a peer says it


def train_step(
    models: Sequence[torch.nn.Module],
    optimizer: Any,
    source: BatchSource,
    *,
    num_microbatches: int,
    learning_rate: float,
    place: Place,
) -> StepReport:
    """Take the rows of one step from the source and update the model once.

    Args:
        models: The chunks of the model on this pipeline stage, in gradient buffers.

    Raises:
        TrainError: The gradient norm is not finite, or the data is used up; nothing was updated.
    """
    microbatches: list[Batch] = [row.to(place.device) for row in _take(source, num_microbatches)]
    for model in models:
        model.zero_grad_buffer()  # type: ignore[operator]
    optimizer.zero_grad()
    loss_sum = forward_backward(models, microbatches)
    grad_norm = update(optimizer, learning_rate)
    finish_router_step(models)
    counted = microbatches if place.counts_rows else []
    inputs = [batch.model_inputs() for batch in counted]
    return StepReport(
        loss_sum=loss_sum if place.tp_rank == 0 else torch.zeros_like(loss_sum),
        num_label_tokens=sum(batch.num_label_tokens for batch in counted),
        grad_norm=grad_norm,
        learning_rate=learning_rate,
        num_tokens=sum(row["input_ids"].shape[0] for row in inputs),
        num_patches=sum(row["pixel_values"].shape[0] for row in inputs),
    )


def _take(source: BatchSource, count: int) -> list[Batch]:
    try:
        return [next(source) for _ in range(count)]
    except StopIteration:
        raise TrainError(
            "data: every source has reached its max_epochs before the schedule ended. "
            "Raise or remove data.sources.*.max_epochs, or lower schedule.steps."
        ) from None
