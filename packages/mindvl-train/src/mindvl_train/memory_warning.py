# SPDX-License-Identifier: Apache-2.0
"""A warning if a run does not fit into device memory by the estimate of the layout search, with the settings that help.

Called by dry_run.py.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from mindvl_train.config import RunConfig
from mindvl_train.devices import Device, find_device, name_of
from mindvl_train.resolved_run import ResolvedRun

if TYPE_CHECKING:
    from mindvl_train.layout_search import Candidate

_NPU = "910b2"  # for recipes with ops.backend=npu on machines without one


def memory_warning(run: ResolvedRun, device: torch.device, kernels: str) -> Iterator[str]:
    """At most one warning.

    Args:
        device: Device of this machine.
        kernels: Kind of the device of the run, which may differ from that of this machine.
    """
    found = find_device(name_of(device)) if device.type != "cpu" else find_device(_NPU) if kernels == "npu" else None
    if found is not None:
        yield from _warning(run, found)


def _warning(run: ResolvedRun, device: Device) -> Iterator[str]:
    from mindvl_train.layout_search import Machine, evaluate
    from mindvl_train.layout_search.request import request_of
    from mindvl_train.layout_search.search import remedies

    config, size = run.config, run.parallel.pp_size
    task = request_of(config, Machine(device=device, num_devices=run.num_processes)).task()
    parallel = replace(run.parallel, stage_layers=run.chunk_layers if size > 1 else None)
    now = evaluate(task, parallel, config.recompute, offload=config.optimizer.offload)
    if now.memory[now.fullest].total <= task.limit:
        return
    rank = now.fullest * run.num_processes // size
    ways = [_described(config, one) for one in remedies(task, parallel)]
    if len(ways) > 1:
        ways = [", ".join(ways[:-1]) + " or " + ways[-1]]
    help_text = f"Set {ways[0]}, or search" if ways else "Use more devices, or search"
    yield (
        f"parallel: rank {rank} needs {now.memory[now.fullest].total / 1e9:.1f} GB by estimate, but {task.limit / 1e9:.1f} of "
        f"{device.memory_gb:.0f} GB of a {device.name} are usable. {help_text} other layouts with mindvl plan."
    )


def _described(config: RunConfig, way: "Candidate") -> str:
    """The overrides of a way that differ from the recipe, with its memory and time."""
    before = vars(config.recompute) | {"offload": config.optimizer.offload}
    after = vars(way.recompute) | {"offload": way.offload}
    names = {name: f"recompute.{name}" for name in vars(config.recompute)} | {"offload": "optimizer.offload"}
    overrides = [
        f"{names[name]}={'null' if value is None else str(value).lower()}"
        for name, value in after.items()
        if value != before[name]
    ]
    host = max(memory.host for memory in way.memory)
    on_host = f"and {host / 1e9:.1f} GB of host memory for each device, " if host else ""
    return (
        f"{' '.join(overrides)} ({way.memory[way.fullest].total / 1e9:.1f} GB, {on_host}{way.time.total:.1f} s a step)"
    )
