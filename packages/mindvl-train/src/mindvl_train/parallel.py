# SPDX-License-Identifier: Apache-2.0
"""Processes of a run: who am I, how many are we, and the groups between us.

Comes before model and data. Rank variables of the launcher are read here and nowhere else.
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
from mindvl_train.config import ParallelConfig
from mindvl_train.errors import TrainError
from mindvl_train.launch import number_of_start
from mindvl_train.megatron.groups import destroy_groups, make_groups, model_parallel_group

PATIENCE = timedelta(minutes=30)
_RUNS = count()  # of this process; the stages of a plan must not read what an earlier one left at the meeting place


@dataclass(frozen=True, kw_only=True)
class Place:
    """Coordinates of this process. Those that differ in tp, pp and cp only train the same packs together."""

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
    model_parallel_ranks: dist.ProcessGroup | None = (
        None  # those that train the same packs, over the host; None: only this one
    )

    @property
    def num_ranks(self) -> int:
        """All processes of the run."""
        return self.tp_size * self.pp_size * self.cp_size * self.dp_size

    @property
    def is_first(self) -> bool:
        """Whether this process writes what is written once."""
        return self.rank == 0

    @property
    def is_first_stage(self) -> bool:
        """Whether it holds vision encoder, projector and embedding."""
        return self.pp_rank == 0

    @property
    def counts_packs(self) -> bool:
        """Whether it speaks for its packs: one of the processes that train the same ones."""
        return self.tp_rank == self.cp_rank == self.pp_rank == 0


@cache
def _meeting_place() -> dist.Store:
    """Where the processes a launcher started find each other: one place for all runs of this process."""
    store, _, _ = next(dist.rendezvous("env://"))
    return cast(dist.Store, store)


@contextmanager
def process_groups(
    accelerator: Accelerator, seed: int, parallel: ParallelConfig | None = None, *, patience: timedelta = PATIENCE
) -> Iterator[Place]:
    """Join the processes a launcher started (torchrun), or be the only one; leave them at the end.

    Args:
        parallel: The layout over them; None: all data parallel.
        patience: How long a collective waits for other processes before it fails.
    """
    rank, world, local_rank = (int(os.environ.get(name, 0)) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    device = accelerator.device(local_rank)
    if device.type != "cpu":
        _check_device(local_rank, torch.get_device_module(device).device_count(), world)
        torch.get_device_module(device).set_device(device)
    store: dist.Store = dist.HashStore()
    if world > 1:
        # A restarted run must not meet the addresses of killed processes either: torchrun keeps its store.
        store = dist.PrefixStore(f"start-{number_of_start()}-run-{next(_RUNS)}", _meeting_place())
    dist.init_process_group(
        accelerator.collective_backend, store=store, rank=rank, world_size=max(world, 1), timeout=patience
    )
    try:
        parallel = parallel or ParallelConfig()
        coordinates = make_groups(seed, parallel, patience)
        peers = model_parallel_group(patience) if parallel.model_parallel_size > 1 else None
        yield Place(rank=rank, device=device, model_parallel_ranks=peers, **coordinates)
    finally:
        destroy_groups()
        dist.destroy_process_group()


def _check_device(local_rank: int, num_devices: int, world: int) -> None:
    if world > 1 and "LOCAL_RANK" not in os.environ:
        raise TrainError(
            "WORLD_SIZE is set, but LOCAL_RANK is not, so all processes of a machine would take its first device. "
            "Environment. Start by torchrun, or export LOCAL_RANK=$SLURM_LOCALID before the command."
        )
    if local_rank >= num_devices:
        raise TrainError(
            f"process {local_rank} of this machine, but {num_devices} devices are visible. LOCAL_RANK. Start as many "
            "processes as there are devices (--nproc), or look at CUDA_VISIBLE_DEVICES or ASCEND_RT_VISIBLE_DEVICES."
        )


def any_process(answer: bool, device: torch.device) -> bool:
    """Whether any process says yes; every process must ask at the same point."""
    flag = torch.tensor(float(answer), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def said_by_any(message: str | None) -> str | None:
    """What the first process that has something to say says; every process must ask at the same point."""
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, message)
    said = [(rank, text) for rank, text in enumerate(messages) if text is not None]
    if not said:
        return None
    rank, text = said[0]
    return text if len(messages) == 1 else f"process {rank}: {text}"
