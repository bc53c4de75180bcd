# SPDX-License-Identifier: Apache-2.0
"""One training step without an optimizer, and the tensors of a model by global name, to compare parallel layouts.

testing/layouts.py starts the processes. Names and offsets are those of megatron-core checkpoints, so that a comparison
covers them, too.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import apply_factories
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import Tensor

from mindvl_model.accelerator.groups import initialize_groups
from mindvl_model.megatron.router import RouterStatistics, record_routing
from mindvl_model.parallel_config import ParallelConfig

Piece = tuple[str, tuple[int, ...], tuple[int, ...], Tensor]  # name, global shape, global offset, content


@dataclass(frozen=True, kw_only=True)
class ParallelState:
    """Coordinates of this process."""

    tp_rank: int
    dp_rank: int
    dp_size: int


@contextmanager
def launched_process() -> Iterator[int]:
    """Create the default process group for the body, with the environment of a launcher; yields the rank."""
    dist.init_process_group("gloo")
    yield dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def parallel_groups(parallel: ParallelConfig) -> Iterator[ParallelState]:
    """Create the process groups of a parallel layout over all processes; they are destroyed at the end."""
    initialize_groups(parallel)
    model_parallel_cuda_manual_seed(0)
    yield ParallelState(
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
    )
    dist.barrier()
    parallel_state.destroy_model_parallel()


def pieces(model: torch.nn.Module) -> list[Piece]:
    """The shards of all tensors of the model on this rank; their contents share memory with the model."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state: Any = model
    state = state.sharded_state_dict(metadata={"dp_cp_group": group})
    apply_factories(state)
    return [
        (
            entry.key,
            tuple(entry.global_shape),
            tuple(entry.global_offset),
            entry.data.detach()[(None,) * entry.prepend_axis_num],
        )
        for entry in nested_values(state)
        if isinstance(entry, ShardedTensor)
    ]


def step(models: Sequence[Any], packs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Run forward and backward over packs with a schedule of megatron-core, reduce gradients, finish the router step.

    Args:
        models: The chunks of this pipeline rank.
        packs: The packs of this data-parallel rank.
    """
    # Overlapped, as in training; raises an error if a parameter has no gradient.
    options = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True)
    wrapped = [DistributedDataParallel(model.config, options, model) for model in models]
    config = models[0].config
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = [model.no_sync for model in wrapped] if len(wrapped) > 1 else wrapped[0].no_sync
    for model in wrapped:
        model.zero_grad_buffer()
    # Pipeline stages exchange activations of one shape, so all packs are padded to the longest.
    length = models[0].parallel.padded_length(max(len(pack["input_ids"]) for pack in packs))
    counts_labels = parallel_state.get_context_parallel_rank() == 0  # megatron-core sums over cp ranks

    def forward_step(batches: Any, stage: torch.nn.Module) -> tuple[Tensor, Any]:
        pack = next(batches)
        output = stage(**pack, pad_to=length)

        def report(loss_sum: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            count = (pack["labels"] != -100).sum().int() * counts_labels
            return loss_sum, count, {"loss_sum": loss_sum.detach()}

        return output, report

    with ExitStack() as recording:
        recorded = [recording.enter_context(record_routing(model)) for model in models]
        reports = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(packs) for _ in models],
            model=wrapped,
            num_microbatches=len(packs),
            seq_length=models[0].message_parts * length,
            micro_batch_size=1,
        )
    mtp_loss = models[-1].take_mtp_loss()
    statistics = [one for model in models for one in _routed(model)]
    for model in models:
        _show_gradients(model)
    return {
        "loss_sum": sum(float(report["loss_sum"]) for report in reports),
        "gradients": [piece for model in models for piece in pieces(model)],
        "load": {one.layer: one.tokens_per_expert for one in statistics},
        "bias": {one.layer: one.bias for one in statistics if one.bias is not None},
        "mtp_loss": 0.0 if mtp_loss is None else float(mtp_loss[:, 0].sum()),
        "choices": {layer: packs for choices in recorded for layer, packs in choices.items()},
        "dp_rank": parallel_state.get_data_parallel_rank(),
        "dp_size": parallel_state.get_data_parallel_world_size(),
    }


def _routed(model: Any) -> list[RouterStatistics]:
    model.finish_router_step()
    statistics: list[RouterStatistics] = model.router_statistics()
    return statistics


def _show_gradients(model: Any) -> None:
    """Copy gradients into the weights, so that `pieces` returns them under the same names; zeros if frozen."""
    for parameter in model.parameters():
        gradient = parameter.main_grad if parameter.requires_grad else torch.zeros_like(parameter)
        parameter.data.copy_(gradient)
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):  # a weight without a gradient
            buffer.zero_()
