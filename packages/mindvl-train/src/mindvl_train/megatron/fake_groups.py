# SPDX-License-Identifier: Apache-2.0
"""One rank of a cluster without the cluster: fake process groups, and the model of that rank without storage.

Used by dry_run.py to count parameters per stage. torch's "fake" backend creates groups of any size in one process.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from mindvl_model import MindVLConfig, MindVLModel
from mindvl_model.accelerator.groups import initialize_groups
from mindvl_model.megatron.stages import build_stages
from mindvl_model.parallel_config import BuildConfig, ParallelConfig


@contextmanager
def fake_process_groups(rank: int, num_processes: int, parallel: ParallelConfig) -> Iterator[dict[str, list[int]]]:
    """Groups without communication for one rank of a parallel layout; yields the ranks in its groups, such as `tp`."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_processes)
    try:
        initialize_groups(parallel)
        groups = {
            "tp": parallel_state.get_tensor_model_parallel_group(),
            "cp": parallel_state.get_context_parallel_group(),
            "ep": parallel_state.get_expert_model_parallel_group(),
            "dp": parallel_state.get_data_parallel_group(),
            "pp": parallel_state.get_pipeline_model_parallel_group(),
        }
        yield {name: list(dist.get_process_group_ranks(group)) for name, group in groups.items()}
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def meta_models(config: MindVLConfig, build_config: BuildConfig) -> list[MindVLModel]:
    """The model chunks of this rank on the meta device.

    Raises:
        ModelError: The parallel layout does not fit the model.
    """
    with torch.device("meta"):
        return build_stages(config, build_config)
