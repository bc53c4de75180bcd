# SPDX-License-Identifier: Apache-2.0
"""Which cores each process of a host runs on: those beside its device, within what it may use, never a remote node.

Comes after topology.py; the paper's CPU core binding (3.1.5). torch_npu places its own threads by CPU_AFFINITY_CONF;
everything else, the threads of the data loader among it, is bound here, by the same ranges.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .topology import Topology, format_cores

_FINE_BINDING = 5  # cores a device needs before torch_npu gives each of its threads one


@dataclass(frozen=True, kw_only=True)
class CoreAssignment:
    """Cores of each process of a host."""

    cores: tuple[frozenset[int], ...]  # by local rank; empty: not bound
    why: tuple[str, ...]  # by local rank, in words


def assign_cores(topology: Topology, devices: Sequence[int], *, kind: str) -> CoreAssignment:
    """Cores for one process on each of `devices`.

    Devices at the same node share its cores evenly, in order. A device without a core of its own node within what the
    process may use is not bound: a remote node would be slower than the system's own choice.

    Args:
        devices: Index of the device of each local rank, after ASCEND_RT_VISIBLE_DEVICES or CUDA_VISIBLE_DEVICES.
        kind: "npu", "cuda", or "cpu", where ranks share the nodes, neighbours on one node.
    """
    if kind == "cpu":
        return _plan_for_cpu(topology, len(devices))
    near = {device.index: device.near for device in topology.devices if device.kind == kind}
    usable = [near.get(index, frozenset()) & topology.allowed for index in devices]
    cores: list[frozenset[int]] = []
    why: list[str] = []
    for rank, (index, mine) in enumerate(zip(devices, usable, strict=True)):
        if not near.get(index):
            cores.append(frozenset())
            why.append(f"{kind} {index}: its NUMA node is not known")
            continue
        sharing = [other for other, theirs in enumerate(usable) if theirs == mine]
        part = _part(sorted(mine), sharing.index(rank), len(sharing))
        cores.append(part)
        if part:
            why.append(f"{kind} {index}: cores {format_cores(part)} of its node")
        else:
            why.append(f"{kind} {index}: no core of its node ({format_cores(near[index])}) is free for this process")
    return CoreAssignment(cores=tuple(cores), why=tuple(why))


def _plan_for_cpu(topology: Topology, num_ranks: int) -> CoreAssignment:
    nodes = [sorted(cores & topology.allowed) for _, cores in sorted(topology.nodes.items())]
    ordered = [core for node in nodes for core in node] or sorted(topology.allowed)
    parts = [_part(ordered, rank, num_ranks) for rank in range(num_ranks)]
    return CoreAssignment(
        cores=tuple(parts),
        why=tuple(f"rank {rank}: cores {format_cores(part) or 'of the system'}" for rank, part in enumerate(parts)),
    )


def _part(cores: Sequence[int], number: int, count: int) -> frozenset[int]:
    """The `number`-th of `count` neighbouring, nearly equal parts."""
    return frozenset(cores[len(cores) * number // count : len(cores) * (number + 1) // count])


def cpu_affinity_conf(plan: CoreAssignment, devices: Sequence[int]) -> str | None:
    """The value of CPU_AFFINITY_CONF that says the same to torch_npu; None when a device is not bound.

    Mode 2 gives each of its threads a core of its own, mode 1 all of them the range: mode 2 needs five cores a device.
    """
    if not all(plan.cores):
        return None
    mode = 2 if min(map(len, plan.cores)) >= _FINE_BINDING else 1
    ranges = [
        f"npu{index}:{part}"
        for index, cores in zip(devices, plan.cores, strict=True)
        for part in format_cores(cores).split(",")
    ]
    return ",".join([str(mode), *ranges])


def bind_thread(cores: Iterable[int]) -> None:
    """Let the calling thread, and those it starts from now on, run on `cores` only; none: no change."""
    wanted = set(cores)
    if wanted:
        os.sched_setaffinity(0, wanted)


def visible_devices(environment: Mapping[str, str], kind: str, num_local_ranks: int) -> list[int]:
    """Physical index of the device of each local rank, as the visibility variables say.

    Names other than numbers (UUIDs of GPUs) cannot be mapped to devices; ranks then count from 0.
    """
    name = {"npu": "ASCEND_RT_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES"}.get(kind, "")
    listed = [part.strip() for part in environment.get(name, "").split(",") if part.strip()]
    if len(listed) >= num_local_ranks and all(part.isdigit() for part in listed):
        return [int(part) for part in listed[:num_local_ranks]]
    return list(range(num_local_ranks))
