# SPDX-License-Identifier: Apache-2.0
"""Process groups of megatron-core.

Adjacent ranks form tensor-parallel groups, then context-, then data-parallel groups; pipeline ranks are furthest apart,
so that the groups with the most communication stay inside a machine.
"""

import math
from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from mindvl_model.parallel_config import ParallelConfig


def create_groups(seed: int, parallel: ParallelConfig, timeout: timedelta) -> dict[str, int]:
    """Create the groups over all processes; returns rank and size in tp, pp, cp and dp, such as `tp_rank`.

    Args:
        timeout: Timeout of collectives; megatron-core takes whole minutes.
    """
    parallel_state.initialize_model_parallel(
        parallel.tp_size,
        parallel.pp_size,
        parallel.virtual_stages if parallel.virtual_stages > 1 else None,
        context_parallel_size=parallel.cp_size,
        expert_model_parallel_size=parallel.ep_size,
        expert_tensor_parallel_size=1,  # experts are never split: sizes above 1 fail over gloo
        create_gloo_process_groups=True,  # required by the distributed optimizer
        distributed_timeout_minutes=math.ceil(timeout / timedelta(minutes=1)),
    )
    model_parallel_cuda_manual_seed(seed)
    return {
        "tp_rank": parallel_state.get_tensor_model_parallel_rank(),
        "tp_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pp_rank": parallel_state.get_pipeline_model_parallel_rank(),
        "pp_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "cp_rank": parallel_state.get_context_parallel_rank(),
        "cp_size": parallel_state.get_context_parallel_world_size(),
        "dp_rank": parallel_state.get_data_parallel_rank(),
        "dp_size": parallel_state.get_data_parallel_world_size(),
    }


def create_model_parallel_group(timeout: timedelta) -> dist.ProcessGroup:
    """The gloo group of the ranks that train the same packs as this one; collective over all ranks."""
    dp_ranks: list[int] = [parallel_state.get_data_parallel_rank()] * dist.get_world_size()
    dist.all_gather_object(dp_ranks, dp_ranks[0])
    members = [[rank for rank, dp_rank in enumerate(dp_ranks) if dp_rank == each] for each in range(max(dp_ranks) + 1)]
    group, _ = dist.new_subgroups_by_enumeration(members, timeout=timeout, backend="gloo")
    return group


def destroy_groups() -> None:
    """Destroy the groups, so that the process can train again."""
    parallel_state.destroy_model_parallel()
