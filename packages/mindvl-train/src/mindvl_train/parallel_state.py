# SPDX-License-Identifier: Apache-2.0
"""Process groups of a run, and the coordinates of this rank in them.

Comes before model and data. The rank variables of the launcher are read here and in launch.py only.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from itertools import count
from typing import cast

import torch
import torch.distributed as dist

from mindvl_model import Accelerator
from mindvl_model.parallel_config import ParallelConfig
from mindvl_train.errors import TrainError
from mindvl_train.launch import restart_count
from mindvl_train.megatron.groups import create_groups, create_model_parallel_group, destroy_groups

DEFAULT_TIMEOUT = timedelta(minutes=30)
_RUNS = count()  # runs of this process; the stages of a pipeline file must not read each other's keys in the store


@dataclass(frozen=True, kw_only=True)
class ParallelState:
    """Coordinates and groups of this rank. Ranks that differ only in tp, pp and cp train the same packs."""

    rank: int
    device: torch.device
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    model_parallel_group: dist.ProcessGroup | None = None  # a gloo group; None: this rank is the only member

    @property
    def num_ranks(self) -> int:
        """Number of processes of the run."""
        return self.tp_size * self.pp_size * self.cp_size * self.dp_size

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes the files that are written once."""
        return self.rank == 0

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank has the vision encoder, the projector and the embedding."""
        return self.pp_rank == 0

    @property
    def is_first_in_group(self) -> bool:
        """Whether this is the first rank of its model-parallel group, which counts and logs the group's packs."""
        return self.tp_rank == self.cp_rank == self.pp_rank == 0


@cache
def _rendezvous_store() -> dist.Store:
    """The store of the launcher, shared by all runs of this process."""
    store, _, _ = next(dist.rendezvous("env://"))
    return cast(dist.Store, store)


@contextmanager
def process_groups(
    accelerator: Accelerator,
    seed: int,
    parallel: ParallelConfig | None = None,
    *,
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> Iterator[ParallelState]:
    """Initialize the process groups of a run, or of a single process without a launcher; destroy them at the end.

    Args:
        parallel: The parallel layout; None: data parallelism only.
        timeout: Timeout of collectives.
    """
    rank, world_size, local_rank = (int(os.environ.get(name, 0)) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    device = accelerator.device(local_rank)
    if device.type != "cpu":
        _check_device(local_rank, torch.get_device_module(device).device_count(), world_size)
        torch.get_device_module(device).set_device(device)
    store: dist.Store = dist.HashStore()
    if world_size > 1:
        # torchrun keeps its store over restarts, so a restarted run must not read the addresses of killed processes.
        store = dist.PrefixStore(f"start-{restart_count()}-run-{next(_RUNS)}", _rendezvous_store())
    dist.init_process_group(
        accelerator.collective_backend,
        store=store,
        rank=rank,
        world_size=max(world_size, 1),
        timeout=timeout,
        # NCCL splits the other groups from one that is bound to its device.
        device_id=device if accelerator.collective_backend == "nccl" else None,
    )
    try:
        parallel = parallel or ParallelConfig()
        coordinates = create_groups(seed, parallel, timeout)
        group = create_model_parallel_group(parallel, timeout) if parallel.model_parallel_size > 1 else None
        yield ParallelState(rank=rank, device=device, model_parallel_group=group, **coordinates)
    finally:
        destroy_groups()
        dist.destroy_process_group()


def _check_device(local_rank: int, num_devices: int, world_size: int) -> None:
    if world_size > 1 and "LOCAL_RANK" not in os.environ:
        raise TrainError(
            f"LOCAL_RANK: is not set, but WORLD_SIZE={world_size}, so all processes of a machine would use its first "
            "device. Start with torchrun, or export LOCAL_RANK=$SLURM_LOCALID before the command."
        )
    if local_rank >= num_devices:
        raise TrainError(
            f"LOCAL_RANK: is {local_rank}, but {num_devices} devices are visible. Start one process per device "
            "(--nproc), or check CUDA_VISIBLE_DEVICES or ASCEND_RT_VISIBLE_DEVICES."
        )


def any_rank(value: bool, device: torch.device) -> bool:
    """Whether value is true on any rank; collective over all ranks."""
    flag = torch.tensor(float(value), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def first_message(message: str | None) -> str | None:
    """The message of the lowest rank that has one; collective over all ranks."""
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, message)
    rank, text = next(((rank, text) for rank, text in enumerate(messages) if text is not None), (0, None))
    return text if text is None or len(messages) == 1 else f"rank {rank}: {text}"
