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
from mindvl_model.layout import Layout
from mindvl_train.config import ParallelConfig, RunConfig
from mindvl_train.megatron.groups import destroy_groups, make_groups

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Coordinates of this process. Those that differ in tp, pp and cp only train the same rows together."""

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

    @property
    def is_first(self) -> bool:
        """Whether this process writes what is written once."""
        return self.rank == 0

    @property
    def is_first_stage(self) -> bool:
        """Whether it holds vision tower, projector and embedding."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether it computes the loss."""
        return self.pp_rank == self.pp_size - 1

    @property
    def counts_rows(self) -> bool:
        """Whether it speaks for its rows: one of the processes that train the same ones."""
        return self.tp_rank == self.cp_rank == self.pp_rank == 0


@contextmanager
def process_groups(accelerator: Accelerator, seed: int, parallel: ParallelConfig | None = None) -> Iterator[Place]:
    """Join the processes a launcher started (torchrun), or be the only one; leave them at the end.

    Args:
        parallel: The layout over them; None: all data parallel.
    """
    rank, world, local_rank = (int(os.environ.get(name, 0)) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    device = accelerator.device(local_rank)
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)
    if world > 1:
        dist.init_process_group(accelerator.collective_backend)
    else:
        dist.init_process_group(accelerator.collective_backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield Place(rank=rank, device=device, **make_groups(seed, parallel or ParallelConfig()))
    finally:
        destroy_groups()
        dist.destroy_process_group()


def layout_of(config: RunConfig) -> Layout:
    """How the model of a run is spread and computed."""
    parallel, recompute = config.parallel, config.recompute
    return Layout(
        tp_size=parallel.tp_size,
        pp_size=parallel.pp_size,
        cp_size=parallel.cp_size,
        ep_size=parallel.ep_size,
        virtual_stages=parallel.virtual_stages,
        stage_layers=parallel.stage_layers,
        spread_images=bool(parallel.spread_images),
        recompute=recompute.kind,
        recompute_layers=recompute.layers,
        dtype=DTYPES[config.precision],
    )


def any_process(answer: bool, device: torch.device) -> bool:
    """Whether any process says yes; every process must ask at the same point."""
    flag = torch.tensor(float(answer), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)
