# SPDX-License-Identifier: Apache-2.0
"""megatron-core's process groups.

Ranks next to each other are tensor-parallel peers, then context, then data; pipeline stages lie furthest apart, so that
the busiest groups stay inside a machine.
"""

import math
from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from mindvl_train.config import ParallelConfig


def make_groups(seed: int, parallel: ParallelConfig, patience: timedelta) -> dict[str, int]:
    """Make the groups over all processes; returns the rank in and the size of tp, pp, cp and dp, such as `tp_rank`.

    Args:
        patience: How long a collective waits for other processes; megatron-core takes whole minutes.
    """
    parallel_state.initialize_model_parallel(
        parallel.tp_size,
        parallel.pp_size,
        parallel.virtual_stages if parallel.virtual_stages > 1 else None,
        context_parallel_size=parallel.cp_size,
        expert_model_parallel_size=parallel.ep_size,
        expert_tensor_parallel_size=1,  # an expert is never split: above 1 fails over gloo
        create_gloo_process_groups=True,  # the distributed optimizer asks for them
        distributed_timeout_minutes=math.ceil(patience / timedelta(minutes=1)),
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


def model_parallel_group(patience: timedelta) -> dist.ProcessGroup:
    """The processes that train the same packs as this one, able to talk over the host; all processes must ask."""
    mine: list[int] = [parallel_state.get_data_parallel_rank()] * dist.get_world_size()
    dist.all_gather_object(mine, mine[0])
    members = [[rank for rank, dp_rank in enumerate(mine) if dp_rank == each] for each in range(max(mine) + 1)]
    group, _ = dist.new_subgroups_by_enumeration(members, timeout=patience, backend="gloo")
    return group


def destroy_groups() -> None:
    """Take the groups down, so that the process can train again."""
    parallel_state.destroy_model_parallel()
