# SPDX-License-Identifier: Apache-2.0
"""Modules that every tensor-parallel rank holds whole while each feeds them other inputs (images that are spread).

Comes around vision encoder and projector. Their gradients are sums over the ranks, and their checkpoints have the names of the
split ones, so that a checkpoint loads either way.
"""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region


def group_of_one() -> torch.distributed.ProcessGroup:
    """A group of this process alone: that of expert tensor parallelism, which is never more (ParallelConfig.ep_size)."""
    group = parallel_state.get_expert_tensor_parallel_group()
    assert group.size() == 1, "make the groups with expert_tensor_parallel_size=1"
    return group


def groups_of_one() -> ProcessGroupCollection:
    """Groups for blocks that are split over nothing."""
    one = group_of_one()
    return ProcessGroupCollection(tp=one, cp=one, pp=one)


def mark_whole(module: torch.nn.Module) -> None:
    """Have the gradients of a module summed over tensor-parallel ranks, and counted once in their norm."""
    for parameter in module.parameters():
        parameter.sequence_parallel = True  # type: ignore[attr-defined]  # megatron-core's word for such a sum
        parameter.tensor_model_parallel = False  # type: ignore[attr-defined]


def number_replicas(state: dict[str, Any]) -> dict[str, Any]:
    """Say in a sharded state, which was made as if this rank were alone, that tensor-parallel peers hold the same."""
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    for entry in nested_values(state):
        if isinstance(entry, ShardedBase):
            assert isinstance(entry.replica_id, tuple)
            first, _, last = entry.replica_id
            entry.replica_id = (first, tp_rank, last)
    return state


def gather_parts(visual_tokens: torch.Tensor) -> torch.Tensor:
    """Equal parts [slot, H] of all tensor- and context-parallel peers, [peers * slot, H]; gradients are summed."""
    group = parallel_state.get_tensor_and_context_parallel_group()
    gathered: torch.Tensor = gather_from_sequence_parallel_region(visual_tokens, group=group)
    return gathered


def peer() -> tuple[int, int]:
    """Rank of this process among its tensor- and context-parallel peers, and their number."""
    group = parallel_state.get_tensor_and_context_parallel_group()
    return group.rank(), group.size()


def sum_gradients(visual_tokens: torch.Tensor) -> torch.Tensor:
    """The same values, whose gradients are summed over tensor-parallel ranks: each used its slice of the row."""
    same: torch.Tensor = copy_to_tensor_model_parallel_region(visual_tokens)
    return same


def context_rank() -> int:
    """Which slice of the row this process has."""
    return int(parallel_state.get_context_parallel_rank())


def tensor_rank() -> int:
    """Which part of that slice, between the layers."""
    return int(parallel_state.get_tensor_model_parallel_rank())
