# SPDX-License-Identifier: Apache-2.0
"""Process groups of megatron-core: only those that a parallel layout uses, created by their members alone.

megatron-core creates every group of every dimension on every rank: 5,051 calls for 1,024 ranks. Here a rank creates the
groups that it is in. Groups of the same ranks are one group, unless both may communicate at the same time, and groups of
which only rank and size are read are not created. Comes after torch's default process group, before the model.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mindvl_model.parallel_config import ParallelConfig

# Groups by what communicates in them. Within a set, groups of the same ranks are one: their collectives never overlap. An
# expert-parallel group is not shared with a data-parallel group, because tokens are exchanged while gradients are reduced.
_SHARED = {
    "DATA_PARALLEL_GROUP": "all",
    "DATA_PARALLEL_GROUP_WITH_CP": "all",
    "EXPERT_DATA_PARALLEL_GROUP": "all",
    "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "all",
    "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "all",
    "TENSOR_MODEL_PARALLEL_GROUP": "tensor",
    "CONTEXT_PARALLEL_GROUP": "tensor",
    "TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tensor",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pipeline",
    "EMBEDDING_GROUP": "pipeline",  # after the schedule
    "EXPERT_MODEL_PARALLEL_GROUP": "expert",
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "expert",
    "EXPERT_TENSOR_PARALLEL_GROUP": "expert",
    "POSITION_EMBEDDING_GROUP": "expert",  # one rank
}
# Groups without communication: the distributed optimizer reads a rank, for a checkpoint format that mindvl does not use.
_UNUSED = ("MODEL_PARALLEL_GROUP", "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP", "TENSOR_AND_DATA_PARALLEL_GROUP")


class UnusedGroup:
    """The place of this rank in a group that is not created; a collective over it raises AttributeError."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = ranks

    def rank(self) -> int:
        """Rank of this process in the group."""
        return self._ranks.index(dist.get_rank())

    def size(self) -> int:
        """Number of ranks of the group."""
        return len(self._ranks)


def initialize_groups(parallel: ParallelConfig, timeout: timedelta | None = None) -> None:
    """Create megatron-core's process groups of a parallel layout over all processes of the default group.

    Args:
        timeout: Timeout of collectives; None: that of the default group.
    """
    from megatron.core import parallel_state

    groups, original = _Groups(timeout), parallel_state.create_group
    parallel_state.create_group = groups.create
    try:
        parallel_state.initialize_model_parallel(
            parallel.tp_size,
            parallel.pp_size,
            parallel.virtual_stages if parallel.virtual_stages > 1 else None,
            context_parallel_size=parallel.cp_size,
            expert_model_parallel_size=parallel.ep_size,
            expert_tensor_parallel_size=1,  # experts are never split: sizes above 1 fail over gloo
            create_gloo_process_groups=False,  # only for checkpoints that mindvl does not use
        )
    finally:
        parallel_state.create_group = original


def create_member_group(
    ranks: Sequence[int],
    timeout: timedelta | None = None,
    backend: str | None = None,
    description: str | None = None,
) -> dist.ProcessGroup:
    """Create a group that this rank is in; the other ranks create groups of their own at the same place.

    The names of groups count the groups that exist, and a split involves all ranks, so every rank has to call this the
    same number of times.

    Args:
        ranks: Members, in ascending order.
        backend: None: that of the default group, from which the group is split if the backend can.
        description: Purpose of the group, for logs and rehearsals.
    """
    if backend is None and _splits():
        created: Any = dist.split_group(split_ranks=[list(ranks)], timeout=timeout, group_desc=description)
    else:
        created = dist.new_group(
            list(ranks), timeout=timeout, backend=backend, use_local_synchronization=True, group_desc=description
        )
    return created


class _Groups:
    """Takes the place of megatron-core's create_group during one initialization."""

    def __init__(self, timeout: timedelta | None) -> None:
        self._timeout = timeout
        self._rank = dist.get_rank()
        self._pipeline: list[int] = []  # ranks of the pipeline whose embedding group comes next
        self._created: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
        world: Any = dist.group.WORLD
        self._created["all", tuple(range(dist.get_world_size()))] = world
        # Of this rank alone. Created first, because not every rank has the same groups of one rank.
        alone = (self._rank,)
        self._alone = world if dist.get_world_size() == 1 else create_member_group(alone, timeout)

    def create(self, ranks: list[int], *, group_desc: str, **options: Any) -> dist.ProcessGroup | UnusedGroup | None:
        """The group of these ranks; None on the other ranks."""
        if group_desc == "PIPELINE_MODEL_PARALLEL_GROUP":
            self._pipeline = ranks
        if self._rank not in ranks:
            if group_desc == "EMBEDDING_GROUP" and self._rank in self._pipeline:
                # Unused: the stages between the first and the last take part in the same number of creations.
                create_member_group([rank for rank in self._pipeline if rank not in ranks], self._timeout)
            return None
        if len(ranks) == 1:
            return self._alone
        if group_desc in _UNUSED:
            return UnusedGroup(ranks)
        key = _SHARED[group_desc], tuple(sorted(ranks))
        if key not in self._created:
            self._created[key] = create_member_group(sorted(ranks), self._timeout, description=group_desc)
        return self._created[key]


def _splits() -> bool:
    """Whether the default group is bound to a device and its backend can split it; NCCL can, gloo and HCCL cannot."""
    world: Any = dist.group.WORLD
    device = world.bound_device_id
    return device is not None and bool(world._get_backend(torch.device(device)).supports_splitting)
