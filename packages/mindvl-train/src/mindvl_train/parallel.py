# SPDX-License-Identifier: Apache-2.0
"""Processes of a run: who am I, how many are we, and the groups between us.

Comes before model and data. Rank variables of the launcher are read here and nowhere else.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mindvl_model import Accelerator
from mindvl_train.megatron.groups import destroy_groups, make_groups


@dataclass(frozen=True)
class Place:
    """Coordinates of this process."""

    rank: int
    dp_rank: int
    dp_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this process writes what is written once."""
        return self.rank == 0


@contextmanager
def process_groups(accelerator: Accelerator, seed: int) -> Iterator[Place]:
    """Join the processes a launcher started (torchrun), or be the only one; leave them at the end."""
    rank, world, local_rank = (int(os.environ.get(name, 0)) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    device = accelerator.device(local_rank)
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)
    if world > 1:
        dist.init_process_group(accelerator.collective_backend)
    else:
        dist.init_process_group(accelerator.collective_backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        dp_rank, dp_size = make_groups(seed)
        yield Place(rank=rank, dp_rank=dp_rank, dp_size=dp_size, device=device)
    finally:
        destroy_groups()
        dist.destroy_process_group()


def any_process(answer: bool, device: torch.device) -> bool:
    """Whether any process says yes; every process must ask at the same point."""
    flag = torch.tensor(float(answer), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)
