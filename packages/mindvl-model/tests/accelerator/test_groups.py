# SPDX-License-Identifier: Apache-2.0
"""Process groups of large layouts, counted with torch's fake backend, and of small ones, over gloo."""

import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from mindvl_model.accelerator import groups
from mindvl_model.accelerator.groups import UnusedGroup, create_member_group, initialize_groups
from mindvl_model.parallel_config import ParallelConfig
from mindvl_model.testing.ranks import run_ranks

# recipes/mindvl-671b-a37b on 1,024 devices; recipes/mindvl-8b on 128; a layout with a middle stage and context parallelism
MOE = ParallelConfig(tp_size=2, pp_size=4, virtual_stages=4, ep_size=128)
DENSE = ParallelConfig(pp_size=2, virtual_stages=4)
DEEP = ParallelConfig(tp_size=2, pp_size=4, cp_size=2)


def counted(initialize: Callable[[ParallelConfig], None], parallel: ParallelConfig, rank: int, size: int) -> Any:
    """Groups of one rank of a cluster: the ranks of each group that it created, in order, and megatron-core's names."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    created: list[list[int]] = []
    original = dist.new_group

    def new_group(ranks: list[int], **options: Any) -> Any:
        created.append(ranks)
        return original(ranks, **{**options, "backend": "fake"})

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    try:
        dist.new_group = new_group
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        initialize(parallel)
        names = {
            name: dist.get_process_group_ranks(group)
            for name, group in vars(parallel_state).items()
            if name.endswith(("_GROUP", "_GROUP_WITH_CP")) and isinstance(group, dist.ProcessGroup)
        }
        return created, names
    finally:
        dist.new_group = original
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        initialize_groups(ParallelConfig())


def as_megatron(parallel: ParallelConfig) -> None:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        parallel.tp_size,
        parallel.pp_size,
        parallel.virtual_stages if parallel.virtual_stages > 1 else None,
        context_parallel_size=parallel.cp_size,
        expert_model_parallel_size=parallel.ep_size,
        expert_tensor_parallel_size=1,
    )


@pytest.mark.parametrize(
    ("parallel", "size", "before", "sizes"),
    [
        # alone, data, tensor, pipeline, first and last stage, stage, expert, data of one expert
        (MOE, 1024, 5051, [1, 128, 2, 4, 2, 256, 128, 2]),
        # alone, data, pipeline
        (DENSE, 128, 1105, [1, 64, 2]),
    ],
    ids=["671b", "8b"],
)
def test_a_rank_creates_only_the_groups_that_it_uses(
    parallel: ParallelConfig, size: int, before: int, sizes: list[int]
) -> None:
    assert len(counted(as_megatron, parallel, 0, size)[0]) == before
    created, _ = counted(initialize_groups, parallel, 0, size)
    assert [len(ranks) for ranks in created] == sizes


@pytest.mark.parametrize(("parallel", "size"), [(MOE, 1024), (DENSE, 128), (DEEP, 32)], ids=["671b", "8b", "deep"])
def test_every_group_that_communicates_has_the_ranks_of_megatron_core(parallel: ParallelConfig, size: int) -> None:
    unused = {
        "_MODEL_PARALLEL_GROUP",
        "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP",
        "_TENSOR_AND_DATA_PARALLEL_GROUP",
    }
    for rank in (0, size // 4 + 1, size - 1):
        _, expected = counted(as_megatron, parallel, rank, size)
        _, found = counted(initialize_groups, parallel, rank, size)
        assert found == {name: ranks for name, ranks in expected.items() if name not in unused or len(ranks) == 1}


@pytest.mark.parametrize(("parallel", "size"), [(MOE, 1024), (DEEP, 32)], ids=["671b", "deep"])
def test_all_ranks_create_equally_many_groups_in_the_same_order(parallel: ParallelConfig, size: int) -> None:
    # The names of groups count the groups that exist, so a rank with another number would wait forever.
    every_stage = [0, size // 4, size // 2, size - 1]
    sizes = [[len(ranks) for ranks in counted(initialize_groups, parallel, rank, size)[0]] for rank in every_stage]
    assert [len(one) for one in sizes] == [len(sizes[0])] * 4
    assert sizes[1] == sizes[0]  # with two middle stages, those between have a group of two as well


def test_a_collective_over_a_group_that_was_not_created_is_an_error() -> None:
    import torch
    import torch.distributed as dist

    group: Any = UnusedGroup([0])
    assert (group.rank(), group.size()) == (0, 1)
    with pytest.raises((AttributeError, ValueError)):
        dist.all_reduce(torch.ones(1), group=group)


def test_groups_are_split_where_the_backend_can(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = SimpleNamespace(supports_splitting=True)
    world = SimpleNamespace(bound_device_id="cuda:0", _get_backend=lambda device: backend)
    stand_in = SimpleNamespace(
        group=SimpleNamespace(WORLD=world),
        split_group=lambda **options: options["split_ranks"],
        new_group=lambda ranks, **options: options,
    )
    monkeypatch.setattr(groups, "dist", stand_in)
    assert create_member_group([0, 2]) == [[0, 2]]  # type: ignore[comparison-overlap]
    on_host: Any = create_member_group([0, 2], backend="gloo")
    assert on_host["use_local_synchronization"]
    backend.supports_splitting = False
    unsplit: Any = create_member_group([0, 2])
    assert unsplit["use_local_synchronization"]


@pytest.mark.slow
def test_collectives_of_every_group_sum_over_its_ranks() -> None:
    run_ranks([__file__], 4, timeout_s=400)


def sum_over_groups() -> None:
    """One of four ranks: the sum over each group is the sum of its ranks, in two layouts one after the other."""
    import torch
    import torch.distributed as dist

    from mindvl_model import set_up_device

    set_up_device("cpu")
    from megatron.core import parallel_state

    dist.init_process_group("gloo")
    for parallel in (ParallelConfig(pp_size=4), ParallelConfig(tp_size=2, ep_size=2), ParallelConfig(cp_size=2)):
        initialize_groups(parallel)
        for name, group in vars(parallel_state).items():
            if isinstance(group, dist.ProcessGroup):
                total = torch.tensor(float(dist.get_rank()))
                dist.all_reduce(total, group=group)
                assert total == sum(dist.get_process_group_ranks(group)), (name, parallel)
        parallel_state.destroy_model_parallel()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    assert os.environ["WORLD_SIZE"] == "4"
    sys.exit(sum_over_groups())
