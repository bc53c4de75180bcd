# SPDX-License-Identifier: Apache-2.0
"""Process groups of megatron-core.

Adjacent ranks form tensor-parallel groups, then context-, then data-parallel groups; pipeline ranks are furthest apart,
so that the groups with the most communication stay inside a machine.
"""

from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.parallel_state import RankGenerator
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from mindvl_model.accelerator.groups import create_member_group, initialize_groups
from mindvl_model.parallel_config import ParallelConfig


def create_groups(seed: int, parallel: ParallelConfig, timeout: timedelta) -> dict[str, int]:
    """Create the groups over all processes; returns rank and size in tp, pp, cp and dp, such as `tp_rank`.

    Args:
        timeout: Timeout of collectives.
    """
    initialize_groups(parallel, timeout)
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


def expert_coordinates() -> dict[str, int]:
    """Rank and size in expert parallelism and in the tensor parallelism of experts, such as `ep_rank`."""
    return {
        "ep_rank": parallel_state.get_expert_model_parallel_rank(),
        "ep_size": parallel_state.get_expert_model_parallel_world_size(),
        "etp_rank": parallel_state.get_expert_tensor_parallel_rank(),
        "etp_size": parallel_state.get_expert_tensor_parallel_world_size(),
    }


def create_model_parallel_group(parallel: ParallelConfig, timeout: timedelta) -> dist.ProcessGroup:
    """The gloo group of the ranks that train the same packs as this one; every rank has to call it."""
    dp_size = dist.get_world_size() // parallel.model_parallel_size
    ranks = RankGenerator(parallel.tp_size, 1, dp_size, parallel.pp_size, parallel.cp_size, order="tp-cp-ep-dp-pp")
    (own,) = (members for members in ranks.get_ranks("tp-cp-pp") if dist.get_rank() in members)
    return create_member_group(own, timeout, backend="gloo", description="SAME_PACKS_GROUP")


def destroy_groups() -> None:
    """Destroy the groups, so that the process can train again."""
    parallel_state.destroy_model_parallel()
