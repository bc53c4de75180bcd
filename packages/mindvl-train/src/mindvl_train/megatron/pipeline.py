# SPDX-License-Identifier: Apache-2.0
"""Forward and backward over the microbatches of one step, by megatron-core's schedule."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import unwrap_model
from torch import Tensor

from mindvl_train.interfaces import Batch


def prepare_schedule(models: Sequence[Any], optimizer: Any) -> None:
    """Tell megatron-core's schedules, which read the models' configuration, how to reduce and to send; call once."""
    is_overlapped = models[0].ddp_config.overlap_grad_reduce
    for model in models:
        config = model.config
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = optimizer.scale_loss
        if is_overlapped:  # reduce with the last microbatch only
            config.no_sync_func = [chunk.no_sync for chunk in models] if len(models) > 1 else models[0].no_sync
        if len(models) > 1:
            # Batched sends are silently wrong between two interleaved stages, and nothing checks that.
            config.overlap_p2p_comm, config.batch_p2p_comm = True, False


def forward_backward(models: Sequence[torch.nn.Module], microbatches: Sequence[Batch]) -> Tensor:
    """Run all microbatches and leave their gradients reduced.

    Gradients are sums over learned tokens, divided once by their global count (megatron's per-token loss).

    Args:
        models: The chunks of this pipeline stage.
        microbatches: Rows of equal length, where there are several stages.

    Returns:
        Summed loss of what this process computed: 0 on all but the last stage, a part with context parallel; the same
        on all tensor-parallel peers.
    """
    # Context-parallel peers compute parts of one row, and megatron-core adds up the counts of all of them.
    counts_labels = parallel_state.get_context_parallel_rank() == 0

    def forward_step(batches: Iterator[Batch], stage: torch.nn.Module) -> tuple[Tensor, Any]:
        batch = next(batches)
        output = stage(**batch.model_inputs())

        def report(loss_sum: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            count = batch.num_label_tokens if counts_labels else 0
            tokens = torch.tensor(count, dtype=torch.int, device=loss_sum.device)
            return loss_sum, tokens, {"loss_sum": loss_sum.detach()}

        return output, report

    inputs = microbatches[0].model_inputs()["input_ids"]
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(microbatches) for _ in models],
        model=list(models),
        num_microbatches=len(microbatches),
        seq_length=inputs.shape[0],
        micro_batch_size=1,
    )
    if not reports:
        return torch.zeros((), device=inputs.device)
    return torch.stack([report["loss_sum"] for report in reports]).sum()


def finish_router_step(models: Sequence[torch.nn.Module]) -> None:
    """Let routers of experts take the load of the step they have seen; call once after every update, on every rank."""
    for model in models:
        inner: Any = unwrap_model(model)
        inner.finish_router_step()
