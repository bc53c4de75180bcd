# SPDX-License-Identifier: Apache-2.0
"""megatron-core's process groups."""

from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed


def make_groups(seed: int) -> tuple[int, int]:
    """Make the groups over all processes, data parallel only; returns (dp_rank, dp_size)."""
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(seed)
    return parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()


def destroy_groups() -> None:
    """Take the groups down, so that the process can train again."""
    parallel_state.destroy_model_parallel()
