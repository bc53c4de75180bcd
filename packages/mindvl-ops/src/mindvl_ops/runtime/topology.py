# SPDX-License-Identifier: Apache-2.0
"""Which cores are near which device: from sysfs, or from npu-smi where sysfs does not know.

Comes before affinity.py. Everything is read below a root that a test can give, and within what the process may use.
"""

import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

DeviceKind = Literal["npu", "cuda"]
_HUAWEI, _NVIDIA = "0x19e5", "0x10de"
_NPU_DEVICES = ("0xd802", "0xd803")  # Atlas A2, A3
_NVIDIA_CLASSES = ("0x0300", "0x0302")  # display and 3D controllers


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator and the cores at its side."""

    index: int  # in the order of the bus, which is that of the driver
    kind: DeviceKind
    bus_id: str  # of the PCI bus; empty where npu-smi reported the device
    near: frozenset[int]  # cores of its NUMA node; empty if unknown


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Cores, nodes and devices of a host."""

    nodes: Mapping[int, frozenset[int]]  # NUMA node -> cores
    devices: tuple[Device, ...]
    allowed: frozenset[int]  # cores that this process may run on (cpuset, taskset)


def read_topology(
    root: Path = Path("/"), *, allowed: Iterable[int] | None = None, npu_smi: str | None = None
) -> Topology:
    """What this host has.

    Args:
        root: Where `sys` lies.
        allowed: Cores of this process; asked of the system when None.
        npu_smi: Output of `npu-smi info -t topo`, used for NPUs whose node sysfs does not know; None: none.
    """
    nodes = {
        int(directory.name.removeprefix("node")): parse_cores(_text(directory / "cpulist"))
        for directory in sorted((root / "sys/devices/system/node").glob("node[0-9]*"))
    }
    usable = os.sched_getaffinity(0) if allowed is None else set(allowed)
    devices = _pci_devices(root / "sys/bus/pci/devices", nodes)
    if npu_smi is not None:
        reported = parse_npu_smi_topology(npu_smi)
        known = {device.index: device for device in devices if device.kind == "npu"}
        devices = [device for device in devices if device.kind != "npu"]
        for index, cores in sorted(reported.items()):
            bus_id = known[index].bus_id if index in known else ""
            devices.append(Device(index=index, kind="npu", bus_id=bus_id, near=cores))
    return Topology(nodes=nodes, devices=tuple(devices), allowed=frozenset(usable))


def ask_npu_smi() -> str | None:
    """`npu-smi info -t topo`, or None where it is not installed or does not answer."""
    try:
        done = subprocess.run(["npu-smi", "info", "-t", "topo"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def parse_npu_smi_topology(text: str) -> dict[int, frozenset[int]]:
    """NPU -> cores, from the matrix whose rows begin with `NPU0` and end with its CPU affinity."""
    found = {}
    for line in text.splitlines():
        row = re.match(r"\s*NPU(\d+)\s+\S.*?(\d[\d,-]*)\s*$", line)
        if row is not None:
            found[int(row[1])] = parse_cores(row[2])
    return found


def parse_cores(text: str) -> frozenset[int]:
    """The numbers of a list such as `0-3,8,10-11`."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def format_cores(cores: Iterable[int]) -> str:
    """The shortest list of ranges: `0-3,8`."""
    ranges: list[list[int]] = []
    for core in sorted(cores):
        if ranges and ranges[-1][1] == core - 1:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)


def _pci_devices(directory: Path, nodes: Mapping[int, frozenset[int]]) -> list[Device]:
    counts: dict[DeviceKind, int] = {"npu": 0, "cuda": 0}
    found = []
    for device in sorted(directory.glob("*")) if directory.is_dir() else ():
        vendor, model = _text(device / "vendor"), _text(device / "device")
        if vendor == _HUAWEI and model in _NPU_DEVICES:
            kind: DeviceKind = "npu"
        elif vendor == _NVIDIA and _text(device / "class")[:6] in _NVIDIA_CLASSES:
            kind = "cuda"
        else:
            continue
        node = _text(device / "numa_node")
        near = parse_cores(_text(device / "local_cpulist"))
        if node.lstrip("-").isdigit() and int(node) in nodes:
            near = nodes[int(node)]
        elif node == "-1":
            near = frozenset()  # the firmware does not say; local_cpulist then lists every core
        found.append(Device(index=counts[kind], kind=kind, bus_id=device.name, near=near))
        counts[kind] += 1
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
