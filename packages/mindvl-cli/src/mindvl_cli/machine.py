# SPDX-License-Identifier: Apache-2.0
"""Cores, memory, devices and versions available to this process, read without importing anything heavy.

Used by `mindvl doctor` and by the demo's report. In a container the limits of the process count, not those of the host.
"""

import os
import platform
from importlib import metadata
from pathlib import Path

TESTED_SET = ("torch", "torch-npu", "megatron-core", "transformers", "tokenizers", "safetensors", "numpy", "pillow")


def num_cores() -> int:
    """Number of cores this process may use, by affinity and container quota; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _first_line(Path("/sys/fs/cgroup/cpu.max")).split()
    if len(quota) == 2 and quota[0].isdigit():
        cores = min(cores, max(1, round(int(quota[0]) / int(quota[1]))))
    return cores


def memory_bytes() -> int:
    """Bytes of memory this process may use, by machine and container limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _first_line(Path("/sys/fs/cgroup/memory.max"))
    return min(total, int(limit)) if limit.isdigit() else total


def num_cuda_devices(dev: Path = Path("/dev")) -> int:
    """Number of NVIDIA devices, counted by device files, which needs neither the driver library nor torch."""
    return sum(path.name.removeprefix("nvidia").isdigit() for path in dev.glob("nvidia*"))


def num_npu_devices(dev: Path = Path("/dev")) -> int:
    """Number of Ascend NPUs, counted by device files."""
    return sum(path.name.removeprefix("davinci").isdigit() for path in dev.glob("davinci*"))


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    """Versions of Python, of the mindvl packages and of the tested libraries, as far as installed."""
    ours = (f"mindvl-{name}" for name in ("cli", "data", "ops", "model", "train", "merge"))
    found = {name: installed_version(name) for name in (*ours, *TESTED_SET)}
    return {"python": platform.python_version(), **{name: version for name, version in found.items() if version}}


def _first_line(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""  # no such limit on this system
