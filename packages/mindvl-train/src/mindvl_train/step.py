# SPDX-License-Identifier: Apache-2.0
"""One optimizer step: microbatches, forward, backward, gradient clipping, update.

Comes after the loader, inside the loop. Between backward and update, faults/anomalous_steps.py decides on the update.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mindvl_train.agreement import agree_on_failed_samples
from mindvl_train.errors import TrainError
from mindvl_train.interfaces import Batch, BatchSource
from mindvl_train.megatron.optimizer import squared_norm, update
from mindvl_train.megatron.pipeline import finish_router_step, forward_backward
from mindvl_train.megatron.repeated_step import expert_overflow, repeated_step
from mindvl_train.parallel_state import ParallelState
from mindvl_train.step_totals import StepTotals, reduce_totals


@dataclass(frozen=True)
class StepReport:
    """Results of one step on this rank. Summed over all ranks, every pack is counted once in any parallel layout."""

    loss_sum: Tensor  # loss of this rank's part of its packs; 0 on all but the first tensor-parallel rank
    num_loss_tokens: int  # loss tokens of this rank's packs; 0 on all but the first rank of a model-parallel group
    grad_norm: float  # over all ranks, before clipping
    learning_rate: float
    num_tokens: int  # tokens of this rank's packs with padding; 0 on all but the first rank of a model-parallel group
    packs: Sequence[Batch] = ()  # packs of this rank, the same on all ranks of its model-parallel group
    was_applied: bool = True  # False: an anomalous step that was skipped; its loss and loss tokens are 0
    was_repeated: bool = False  # whether it was computed again, because rows did not fit into an expert message
    stop: bool = False  # whether a rank requested to stop the run after this step


def train_step(
    models: Sequence[torch.nn.Module],
    optimizer: Any,
    source: BatchSource,
    *,
    num_microbatches: int,
    learning_rate: float,
    ranks: ParallelState,
    may_update: Callable[[StepTotals, Tensor, Sequence[Batch]], bool],
    should_stop: Callable[[], bool] = lambda: False,
    begin: Callable[[str], None] = lambda part: None,
) -> StepReport:
    """Take the packs of one step from the source and update the model once.

    Args:
        models: The model chunks of this pipeline rank, in gradient buffers.
        may_update: Called with the totals over all ranks, this rank's loss sum and its packs; must return the same
            value on every rank.
        should_stop: Called once, after the gradients are reduced; the report has the result over all ranks.
        begin: Called at the start of each part of the step: data, compute, reduce, update. A repeated step has the last
            three twice.

    Raises:
        TrainError: The data is used up, or may_update ends the run; nothing was updated.
    """
    begin("data")
    microbatches = _next_packs(source, num_microbatches, ranks)
    counted = microbatches if ranks.is_first_in_group else []
    num_loss_tokens = sum(batch.num_loss_tokens for batch in counted)

    def compute(stop: Callable[[], bool]) -> tuple[Tensor, Tensor, StepTotals]:
        """Gradients of the step; returns the loss sum of this rank, its part without replicas, and the totals."""
        begin("compute")
        for model in models:
            model.zero_grad_buffer()  # type: ignore[operator]
        optimizer.zero_grad()
        loss_sum = forward_backward(models, microbatches, ranks.device, before_reduce=lambda: begin("reduce"))
        begin("update")
        # Tensor-parallel ranks have the same loss.
        own_loss = loss_sum if ranks.tp_rank == 0 else torch.zeros_like(loss_sum)
        square, overflow = squared_norm(optimizer), expert_overflow(models)
        return loss_sum, own_loss, reduce_totals(square, own_loss, num_loss_tokens, stop=stop(), overflow=overflow)

    loss_sum, own_loss, totals = compute(should_stop)
    was_repeated = totals.overflowed
    if was_repeated:
        stop = totals.stop
        with repeated_step(models):
            loss_sum, own_loss, totals = compute(lambda: stop)
    was_applied = may_update(totals, loss_sum, microbatches)
    if was_applied:
        update(optimizer, learning_rate, totals.grad_norm)
    finish_router_step(models, was_applied=was_applied)
    return StepReport(
        loss_sum=own_loss if was_applied else torch.zeros_like(loss_sum),
        num_loss_tokens=num_loss_tokens if was_applied else 0,
        grad_norm=totals.grad_norm,
        learning_rate=learning_rate,
        num_tokens=sum(len(batch.model_inputs()["input_ids"]) for batch in counted),
        packs=microbatches,
        was_applied=was_applied,
        was_repeated=was_repeated,
        stop=totals.stop,
    )


def _next_packs(source: BatchSource, count: int, ranks: ParallelState) -> list[Batch]:
    try:
        packs = [next(source) for _ in range(count)]
    except StopIteration:
        raise TrainError(
            "data: every source has reached its max_epochs before the schedule ended. "
            "Raise or remove data.sources.*.max_epochs, or lower schedule.steps."
        ) from None
    group = ranks.model_parallel_group
    return packs if group is None else agree_on_failed_samples(packs, source, group)
