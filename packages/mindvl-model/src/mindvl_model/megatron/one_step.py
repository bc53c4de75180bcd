# SPDX-License-Identifier: Apache-2.0
"""One training step without an optimizer, and the tensors of a model by global name: what layouts are compared by.

Comes after the model; testing/layouts.py starts the processes. Names and places are those of megatron-core's
checkpoints, so that a comparison proves them, too.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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

from mindvl_model.megatron.blocks import Layout
from mindvl_model.megatron.router import record_routing

Piece = tuple[str, tuple[int, ...], tuple[int, ...], Tensor]  # name, shape of the whole, place in it, content


@dataclass(frozen=True, kw_only=True)
class Place:
    """Coordinates of this process."""

    rank: int
    tp_rank: int
    dp_rank: int
    is_first_stage: bool
    is_last_stage: bool


@contextmanager
def launched_process(layout: Layout) -> Iterator[Place]:
    """Groups of a layout over the processes a launcher started."""
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        layout.tp_size,
        layout.pp_size,
        expert_model_parallel_size=layout.ep_size,
        expert_tensor_parallel_size=1,
    )
    model_parallel_cuda_manual_seed(0)
    yield Place(
        rank=dist.get_rank(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        is_first_stage=parallel_state.is_pipeline_first_stage(),
        is_last_stage=parallel_state.is_pipeline_last_stage(),
    )
    dist.barrier()
    dist.destroy_process_group()


def pieces(model: torch.nn.Module) -> list[Piece]:
    """Every tensor of the model on this rank; contents share memory with it."""
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


def step(model: Any, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Forward and backward over rows by megatron-core's schedule, gradients reduced; then the routers' step."""
    config = model.config
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    config.finalize_model_grads_func = finalize_model_grads
    wrapped.zero_grad_buffer()

    def forward_step(batches: Any, stage: torch.nn.Module) -> tuple[Tensor, Any]:
        row = next(batches)
        output = stage(**row)

        def report(loss_sum: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            return loss_sum, (row["labels"] != -100).sum().int(), {"loss_sum": loss_sum.detach()}

        return output, report

    with record_routing(model) as choices:
        reports = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(rows),
            model=wrapped,
            num_microbatches=len(rows),
            seq_length=len(rows[0]["input_ids"]),
            micro_batch_size=1,
        )
    mtp_loss = model.take_mtp_loss()
    model.finish_router_step()
    statistics = model.router_statistics()
    for parameter in model.parameters():
        parameter.data.copy_(parameter.main_grad)
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):  # a weight without a gradient
            buffer.zero_()
    return {
        "loss_sum": sum(float(report["loss_sum"]) for report in reports),
        "gradients": pieces(model),
        "load": {one.layer: one.tokens_per_expert for one in statistics},
        "bias": {one.layer: one.bias for one in statistics if one.bias is not None},
        "mtp_loss": 0.0 if mtp_loss is None else float(mtp_loss[:, 0].sum()),
        "choices": choices,
        "dp_rank": parallel_state.get_data_parallel_rank(),
        "dp_size": parallel_state.get_data_parallel_world_size(),
    }
