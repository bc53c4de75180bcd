# SPDX-License-Identifier: Apache-2.0
"""Process groups of a single process, to build a model outside training: conversion, checks, tests.

Training creates its own groups (mindvl_train.parallel).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from mindvl_model.accelerator.groups import initialize_groups
from mindvl_model.parallel_config import ParallelConfig


@contextmanager
def single_process() -> Iterator[None]:
    """Create process groups of one process for the body; existing groups are used and not destroyed."""
    if parallel_state.model_parallel_is_initialized():
        yield
        return
    started = not dist.is_initialized()
    if started:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    initialize_groups(ParallelConfig())
    model_parallel_cuda_manual_seed(0)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        if started:
            dist.destroy_process_group()
