# SPDX-License-Identifier: Apache-2.0
"""Modules replicated on tensor-parallel ranks with different inputs: vision encoder and projector with spread images.

Their gradients are summed over the ranks. Their checkpoints have the names of the split modules, so that a checkpoint
can be loaded with and without `spread_images`.
"""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region


def group_of_one() -> torch.distributed.ProcessGroup:
    """The process group of expert tensor parallelism, which contains only this process (ParallelConfig.ep_size)."""
    group = parallel_state.get_expert_tensor_parallel_group()
    assert group.size() == 1, "create the process groups with expert_tensor_parallel_size=1"
    return group


def groups_of_one() -> ProcessGroupCollection:
    """Process groups for blocks without model parallelism."""
    one = group_of_one()
    return ProcessGroupCollection(tp=one, cp=one, pp=one)


def mark_whole(module: torch.nn.Module) -> None:
    """Mark the gradients of a module as summed over tensor-parallel ranks and counted once in the gradient norm."""
    for parameter in module.parameters():
        parameter.sequence_parallel = True  # type: ignore[attr-defined]  # megatron-core sums such gradients
        parameter.tensor_model_parallel = False  # type: ignore[attr-defined]


def number_replicas(state: dict[str, Any]) -> dict[str, Any]:
    """Set the replica ids of a sharded state that was built without tensor parallelism, by tensor-parallel rank."""
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    for entry in nested_values(state):
        if isinstance(entry, ShardedBase):
            assert isinstance(entry.replica_id, tuple)
            first, _, last = entry.replica_id
            entry.replica_id = (first, tp_rank, last)
    return state


def gather_parts(visual_tokens: torch.Tensor) -> torch.Tensor:
    """Gather parts [S, H] of equal length from all tensor- and context-parallel ranks, [tp*cp*S, H]; sums gradients."""
    group = parallel_state.get_tensor_and_context_parallel_group()
    gathered: torch.Tensor = gather_from_sequence_parallel_region(visual_tokens, group=group)
    return gathered


def tensor_and_context_rank() -> tuple[int, int]:
    """Rank of this process in the group of tensor- and context-parallel ranks, and the size of the group."""
    group = parallel_state.get_tensor_and_context_parallel_group()
    return group.rank(), group.size()


def sum_gradients(visual_tokens: torch.Tensor) -> torch.Tensor:
    """Return the same values, with gradients summed over tensor-parallel ranks, each of which uses a slice of the pack."""
    same: torch.Tensor = copy_to_tensor_model_parallel_region(visual_tokens)
    return same


def context_rank() -> int:
    """Context-parallel rank of this process: the index of its slice of the pack."""
    return int(parallel_state.get_context_parallel_rank())


def tensor_rank() -> int:
    """Tensor-parallel rank of this process: with sequence parallelism, the index of its part of that slice."""
    return int(parallel_state.get_tensor_model_parallel_rank())
