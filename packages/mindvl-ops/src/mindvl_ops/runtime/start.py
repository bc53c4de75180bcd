# SPDX-License-Identifier: Apache-2.0
"""Make one process of a run ready, before the library of its device is imported.

Comes last of the runtime: variables that are missing are set, cores are bound; the run then imports torch_npu or
starts CUDA. Called by the trainer, once in each process; nothing else of this package changes the process.
"""

import logging
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .affinity import assign_cores, bind_thread, cpu_affinity_conf, visible_devices
from .env import Device, missing_variables
from .topology import Topology, ask_npu_smi, read_topology

logger = logging.getLogger(__name__)

Binding = Literal["auto", "on", "off"]


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What was done for this process."""

    variables: dict[str, str]  # set now, because they were not
    cores: frozenset[int]  # for its threads; empty: wherever the system puts them


def prepare_process(
    environment: MutableMapping[str, str],
    kind: Device,
    *,
    local_rank: int,
    num_local_ranks: int,
    binding: Binding = "auto",
    memory_tight: bool = False,
    topology: Topology | None = None,
) -> Prepared:
    """Set what is missing in `environment` and bind this process.

    Args:
        environment: Of this process; what it holds already is never replaced.
        binding: "auto" binds where there are devices, or several NUMA nodes.
        topology: Of this host; read when None.
    """
    variables = missing_variables(environment, kind, num_devices=num_local_ranks, memory_tight=memory_tight)
    cores: frozenset[int] = frozenset()
    if binding != "off" and "CPU_AFFINITY_CONF" not in environment:
        host = topology or _this_host(kind)
        if binding == "on" or kind != "cpu" or len(host.nodes) > 1:
            devices = visible_devices(environment, kind, num_local_ranks)
            plan = assign_cores(host, devices, kind=kind)
            cores = plan.cores[local_rank]
            logger.info("cores: %s", plan.why[local_rank])
            conf = cpu_affinity_conf(plan, devices) if kind == "npu" else None
            if conf is not None:
                variables["CPU_AFFINITY_CONF"] = conf
    environment.update(variables)
    if kind != "npu":
        bind_thread(cores)  # on an NPU torch_npu places its own threads by the variable
    for name, value in variables.items():
        logger.info("set %s=%s", name, value)
    return Prepared(variables=variables, cores=cores)


def device_kind(root: Path = Path("/")) -> Device:
    """What this host offers, by its device files: the library of a device must not be imported before it is ready."""
    files = root / "dev"
    if any(path.name.removeprefix("davinci").isdigit() for path in files.glob("davinci*")):
        return "npu"
    return "cuda" if any(path.name.removeprefix("nvidia").isdigit() for path in files.glob("nvidia*")) else "cpu"


def _this_host(kind: Device) -> Topology:
    host = read_topology()
    if kind == "npu" and not all(device.near for device in host.devices if device.kind == "npu"):
        return read_topology(npu_smi=ask_npu_smi())
    return host
