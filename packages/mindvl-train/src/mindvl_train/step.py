# SPDX-License-Identifier: Apache-2.0
"""One optimizer update: microbatches, forward, backward, clip, update.

Comes after the loader, inside the loop. Whether it counts is asked in between (faults/anomalous_steps.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mindvl_train.errors import TrainError
from mindvl_train.interfaces import Batch, BatchSource
from mindvl_train.megatron.optimizer import gradient_norm, update
from mindvl_train.megatron.pipeline import finish_router_step, forward_backward
from mindvl_train.parallel import Place
from mindvl_train.peers import agree


@dataclass(frozen=True)
class StepReport:
    """What one update did on this rank. Sums over all ranks count every pack once, in any layout."""

    loss_sum: Tensor  # over loss tokens: of what this rank computed, 0 where a peer says it
    num_loss_tokens: int  # loss tokens of this rank's packs; 0 where a peer that trains the same packs says it
    grad_norm: float  # over all ranks, before clipping
    learning_rate: float
    num_tokens: int  # tokens of this rank's packs, padding included; 0 where a peer says it
    packs: Sequence[Batch] = ()  # of this rank; peers that train the same packs have them, too
    was_applied: bool = True  # False: a bad step that was left out; its loss and loss tokens are 0


def train_step(
    models: Sequence[torch.nn.Module],
    optimizer: Any,
    source: BatchSource,
    *,
    num_microbatches: int,
    learning_rate: float,
    place: Place,
    may_update: Callable[[float, Tensor, Sequence[Batch]], bool],
    begin: Callable[[str], None] = lambda part: None,
) -> StepReport:
    """Take the packs of one step from the source and update the model once.

    Args:
        models: The chunks of the model on this pipeline stage, in gradient buffers.
        may_update: Told the gradient norm over all ranks, this rank's loss sum and packs; the same answer on every rank.
        begin: Told which part of the step begins: data, compute, reduce, update.

    Raises:
        TrainError: The data is used up, or may_update ends the run; nothing was updated.
    """
    begin("data")
    microbatches = _take(source, num_microbatches, place)
    begin("compute")
    for model in models:
        model.zero_grad_buffer()  # type: ignore[operator]
    optimizer.zero_grad()
    loss_sum = forward_backward(models, microbatches, place.device, before_reduce=lambda: begin("reduce"))
    begin("update")
    grad_norm = gradient_norm(optimizer)
    was_applied = may_update(grad_norm, loss_sum, microbatches)
    if was_applied:
        update(optimizer, learning_rate, grad_norm)
    finish_router_step(models, was_applied=was_applied)
    counted = microbatches if place.counts_packs else []
    return StepReport(
        loss_sum=loss_sum if place.tp_rank == 0 and was_applied else torch.zeros_like(loss_sum),
        num_loss_tokens=sum(batch.num_loss_tokens for batch in counted) if was_applied else 0,
        grad_norm=grad_norm,
        learning_rate=learning_rate,
        num_tokens=sum(len(batch.model_inputs()["input_ids"]) for batch in counted),
        packs=microbatches,
        was_applied=was_applied,
    )


def _take(source: BatchSource, count: int, place: Place) -> list[Batch]:
    try:
        packs = [next(source) for _ in range(count)]
    except StopIteration:
        raise TrainError(
            "data: every source has reached its max_epochs before the schedule ended. "
            "Raise or remove data.sources.*.max_epochs, or lower schedule.steps."
        ) from None
    return packs if place.model_parallel_ranks is None else agree(packs, source, place.model_parallel_ranks)
