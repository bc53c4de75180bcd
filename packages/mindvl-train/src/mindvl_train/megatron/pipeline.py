# SPDX-License-Identifier: Apache-2.0
"""Forward and backward over the microbatches of one step, or forward alone, by megatron-core's schedule."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import unwrap_model
from torch import Tensor

from mindvl_model.placeholders import check_placeholders
from mindvl_train.interfaces import Batch
from mindvl_train.staging import staged


def prepare_schedule(models: Sequence[Any], optimizer: Any) -> None:
    """Set the fields of the model configuration that megatron-core's schedules read; call once."""
    is_overlapped = models[0].ddp_config.overlap_grad_reduce
    for model in models:
        config = model.config
        config.grad_scale_func = optimizer.scale_loss
        if is_overlapped:  # reduce with the last microbatch only
            config.no_sync_func = [chunk.no_sync for chunk in models] if len(models) > 1 else models[0].no_sync
        if len(models) > 1:
            # Batched sends silently give wrong results with two interleaved stages.
            config.overlap_p2p_comm, config.batch_p2p_comm = True, False


def forward_backward(
    models: Sequence[torch.nn.Module],
    microbatches: Sequence[Batch],
    device: torch.device,
    *,
    before_reduce: Callable[[], None] = lambda: None,
) -> Tensor:
    """Run forward and backward over all microbatches and reduce their gradients.

    Gradients are sums over loss tokens, divided once by their global count (megatron's per-token loss).

    Args:
        models: The model chunks of this pipeline rank.
        microbatches: Packs of one step, on the host; each is copied to the device before its forward pass.
        before_reduce: Called after the last backward pass of this rank, before gradients are reduced.

    Returns:
        Loss sum of this rank: 0 on all stages but the last, a part of it with context parallelism, the same on all
        tensor-parallel ranks.
    """

    def finish(chunks: Sequence[Any], num_loss_tokens: Tensor, **options: Any) -> None:
        before_reduce()
        finalize_model_grads(list(chunks), None, **options)
        _divide_gradients(chunks, num_loss_tokens)

    for model in models:
        config: Any = model.config
        config.finalize_model_grads_func = finish
    reports = _run_schedule(models, microbatches, device)
    if not reports:
        return torch.zeros((), device=device)
    return torch.stack([report["loss_sum"] for report in reports]).sum()


def forward_only(models: Sequence[Any], microbatches: Sequence[Batch], device: torch.device) -> None:
    """Run forward over all microbatches; the caller has put the models into `predictions` blocks, which record results.

    With overlap, parameters that were updated in the last step are gathered first, and hooks that gather parameters in
    a training step do not run.
    """
    hooked = [model for model in models if getattr(model, "remove_forward_pre_hook_handles", None)]
    for model in hooked:
        model.disable_forward_pre_hook()
    try:
        _run_schedule(models, microbatches, device, forward_only=True)
    finally:
        for model in hooked:
            model.enable_forward_pre_hook()


def _run_schedule(
    models: Sequence[Any], microbatches: Sequence[Batch], device: torch.device, *, forward_only: bool = False
) -> list[dict[str, Tensor]]:
    """Run megatron-core's schedule; returns the loss of each microbatch on the last stage."""
    # Context-parallel ranks compute parts of one pack, and megatron-core sums the counts of all of them.
    counts_labels = parallel_state.get_context_parallel_rank() == 0

    longest = max(len(batch.model_inputs()["input_ids"]) for batch in microbatches)
    pipelined = parallel_state.get_pipeline_model_parallel_world_size() > 1
    # Activations between stages have one shape. megatron-core can send shapes first, but every send then waits for them.
    padding: dict[str, int] = {"pad_to": longest} if pipelined else {}
    parts = unwrap_model(models[0]).message_parts if pipelined else 1

    def forward_step(batches: Iterator[Batch], stage: torch.nn.Module) -> tuple[Tensor, Any]:
        batch = next(batches)
        output = stage(**batch.model_inputs(), **padding)

        def report(loss_sum: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            count = batch.num_loss_tokens if counts_labels else 0
            tokens = torch.full((), count, dtype=torch.int, device=loss_sum.device)  # no host-to-device copy
            return loss_sum, tokens, {"loss_sum": loss_sum.detach()}

        return output, report

    reports: list[dict[str, Tensor]] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[_on_device(microbatches, unwrap_model(model), device) for model in models],
        model=list(models),
        num_microbatches=len(microbatches),
        seq_length=parts * unwrap_model(models[0]).parallel.padded_length(longest),
        micro_batch_size=1,
        forward_only=forward_only,
    )
    for model in models:  # a chunk keeps the activations it received last, with their gradient, until the next step
        unwrap_model(model).set_input_tensor(None)
    return reports


def _divide_gradients(chunks: Sequence[Any], num_loss_tokens: Tensor) -> None:
    """Divide gradients by the number of loss tokens over all ranks, if there are any.

    The same messages and values as in finalize_model_grads, which waits on the host, once per chunk, to compare the
    number with 0.

    Args:
        num_loss_tokens: Loss tokens of this data- and context-parallel rank, known on the last stage; summed in place.
    """
    stages = parallel_state.get_pipeline_model_parallel_group()
    dist.broadcast(num_loss_tokens, src=dist.get_process_group_ranks(stages)[-1], group=stages)
    dist.all_reduce(num_loss_tokens, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    scale = torch.where(num_loss_tokens > 0, 1.0 / num_loss_tokens, 1.0)
    for chunk in chunks:
        chunk.scale_gradients(scale)


def _on_device(microbatches: Sequence[Batch], model: Any, device: torch.device) -> Iterator[Batch]:
    """Copies of packs on the device, checked on the host before the copy."""

    def checked() -> Iterator[Batch]:
        for batch in microbatches:
            if model.pre_process and device.type != "cpu":  # on a CPU the model checks them
                check_placeholders(model.mindvl, **batch.model_inputs())
            yield batch

    return staged(checked(), device)


def finish_router_step(models: Sequence[torch.nn.Module], *, was_applied: bool) -> None:
    """Finish the load statistics of expert routers; call once after every step, on every rank.

    Args:
        was_applied: False for a skipped step, which leaves the biases of routers unchanged.
    """
    for model in models:
        inner: Any = unwrap_model(model)
        inner.finish_router_step(move_bias=was_applied)
