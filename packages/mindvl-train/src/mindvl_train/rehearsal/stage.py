# SPDX-License-Identifier: Apache-2.0
"""What a single process without a device cannot have is replaced: process groups, data, weights, checkpoint files.

Used by process.py around `run_training`, in the process of one rank. The code of the step itself is not replaced.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves, tree_map

from mindvl_ops import Segments
from mindvl_train import loading, parallel_state, weights
from mindvl_train import run as run_module
from mindvl_train.checkpoints import saving
from mindvl_train.config import InitSection, RunConfig
from mindvl_train.megatron import optimizer as optimizer_module
from mindvl_train.metrics import run_card, sinks
from mindvl_train.rehearsal.answers import objects_of_all
from mindvl_train.rehearsal.job import TOKENS, Job
from mindvl_train.rehearsal.messages import fake_groups
from mindvl_train.rehearsal.packs import Packs
from mindvl_train.rehearsal.rank import Rank
from mindvl_train.resolved_run import ResolvedRun


@contextmanager
def replaced(job: Job, rank: Rank) -> Iterator[None]:
    """Replace them inside the block; every part of the run calls `rank`."""
    with ExitStack() as stack:

        def put(place: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(place, name, value))

        for place in (dist, c10d):
            put(place, "batch_isend_irecv", rank.messages.batch(c10d.batch_isend_irecv))
            put(place, "all_gather_object", _gathered_objects(rank))
            put(place, "broadcast_object_list", _broadcast_objects(rank))
        stack.enter_context(mock.patch.dict(c10d.Backend.backend_capability, {"fake": ["cpu", job.kind]}))
        put(
            c10d,
            "_new_process_group_helper",
            fake_groups(rank.messages, c10d._new_process_group_helper, job.world_size),
        )
        put(c10d, "_get_process_group_uid", lambda group: 0)
        put(FakeWork, "wait", rank.messages.wait(FakeWork.wait))
        put(parallel_state, "_rendezvous_store", FakeStore)
        put(nn.Module, "_apply", _apply_anew)
        put(torch, "tensor", _tensor_of_scalars(torch.tensor, rank))
        put(FakeTensor, "tolist", lambda value: rank.device_mode.tolist(value))
        put(
            FakeTensor, "numpy", lambda value: np.zeros(value.shape)
        )  # on a CPU, where copies to the host are fake, too
        put(weights, "initialize", lambda *_, **__: None)
        put(weights, "_load_init", lambda *_: set())
        put(weights, "start_adapters", lambda *_: None)
        put(weights, "start_norms", lambda *_: None)
        put(weights, "build_models", rank.during("build", weights.build_models))
        put(optimizer_module, "wrap_models", rank.during("wrap", optimizer_module.wrap_models))
        put(optimizer_module, "build_optimizer", rank.during("optimizer", optimizer_module.build_optimizer))
        put(run_module, "_build_state", rank.building(run_module._build_state))
        put(loading, "Loader", _loader(job, rank))
        put(run_module, "with_tokenizer", _with_tokens)
        put(run_module, "check_operators", lambda **_: [])
        put(run_module, "table_text", lambda _: "not compared in a rehearsal")
        put(run_module, "Watchdog", lambda *_, **__: rank)
        if job.kind == "cpu":
            put(Segments, "derived", _planned(Segments.derived, rank))
        put(run_card, "name_of", lambda _: job.device)
        put(sinks, "open_sinks", lambda *_: [])
        put(saving, "Saver", lambda *_: rank)
        yield


def config_of(job: Job, out: Path) -> RunConfig:
    """The configuration of the recipe with as many steps as are rehearsed, without initial weights, sinks and validation."""
    config = job.config
    return replace(
        config,
        out=out,
        init=InitSection(),
        schedule=replace(config.schedule, steps=job.steps),
        validation=None,
        metrics=replace(config.metrics, tensorboard=False, wandb_project=None, swanlab_project=None),
        checkpoints=replace(config.checkpoints, async_save=False),
        ops=replace(config.ops, runtime=replace(config.ops.runtime, bind_cores="off")),
    )


def _loader(job: Job, rank: Rank) -> Callable[..., Packs]:
    def loader(data: Any, *, with_pixels: bool, **_: Any) -> Packs:
        model = replace(job.config.model.resolved, tokens=TOKENS)
        copied = job.kind == "cpu"
        with rank.device_mode.on_host():
            return Packs(job.pack, model, data.sources[0].name, with_pixels=with_pixels or copied, copied=copied)

    return loader


def _with_tokens(run: ResolvedRun) -> ResolvedRun:
    return replace(run, model=replace(run.model, tokens=TOKENS))


def _gathered_objects(rank: Rank) -> Callable[..., None]:
    def all_gather_object(found: list[Any], mine: Any, group: Any = None) -> None:
        rank.messages.keep_objects(group)
        found[:] = objects_of_all(mine, len(found))

    return all_gather_object


def _broadcast_objects(rank: Rank) -> Callable[..., None]:
    def broadcast_object_list(objects: list[Any], src: int | None = None, group: Any = None, **_: Any) -> None:
        rank.messages.keep_objects(group, "broadcast_object", peer=src or 0)

    return broadcast_object_list


def _planned(original: Callable[..., Any], rank: Rank) -> Callable[..., Any]:
    def derived(segments: Segments, key: Any, make: Callable[[], Any]) -> Any:
        """Segments.derived: what follows from lengths is made with values, because kernels of the CPU read them."""
        with rank.device_mode.on_host():
            return original(segments, key, make)

    return derived


def _tensor_of_scalars(original: Callable[..., Tensor], rank: Rank) -> Callable[..., Tensor]:
    def tensor(data: Any, *rest: Any, **options: Any) -> Tensor:
        """A tensor of device scalars, as megatron-core's gradient norm makes one: C++ reads each past any mode."""
        if not isinstance(data, Tensor) and any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(data)):
            data = tree_map(lambda x: rank.device_mode.tolist(x) if isinstance(x, FakeTensor) else x, data)
        return original(data, *rest, **options)

    return tensor


def _apply_anew(self: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
    """nn.Module._apply with new parameters: the original swaps them, which fake tensors refuse."""
    for child in self.children() if recurse else ():
        child._apply(fn)
    for name, old in self._parameters.items():
        if old is None:
            continue
        with torch.no_grad():
            new = fn(old)
        if new is not old and not (isinstance(old, FakeTensor) and new.dtype == old.dtype):
            self._parameters[name] = nn.Parameter(new, requires_grad=old.requires_grad)
            self._parameters[name].__dict__.update(old.__dict__)
    self._buffers.update({name: fn(buffer) for name, buffer in self._buffers.items() if buffer is not None})
    return self
