# SPDX-License-Identifier: Apache-2.0
"""Hosts as sysfs would show them."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

IDS = {
    "npu": ("0x19e5", "0xd802", "0x120000"),
    "cuda": ("0x10de", "0x2330", "0x030200"),
    "other": ("0x8086", "0x1", "0x0"),
}


@pytest.fixture
def make_host(tmp_path: Path) -> Callable[..., Path]:
    """make_host(nodes=[cores of each], npu=[node of each], cuda=..., other=...) -> root of a sysfs."""

    def make(nodes: Sequence[str], **devices: Sequence[int]) -> Path:
        for number, cores in enumerate(nodes):
            directory = tmp_path / f"sys/devices/system/node/node{number}"
            directory.mkdir(parents=True)
            (directory / "cpulist").write_text(f"{cores}\n")
        slot = 0
        for kind, places in devices.items():
            for node in places:
                slot += 1
                directory = tmp_path / f"sys/bus/pci/devices/0000:{slot:02x}:00.0"
                directory.mkdir(parents=True)
                texts = dict(zip(("vendor", "device", "class"), IDS[kind], strict=True))
                texts |= {"numa_node": str(node), "local_cpulist": nodes[node] if node >= 0 else ",".join(nodes)}
                for name, text in texts.items():
                    (directory / name).write_text(f"{text}\n")
        return tmp_path

    return make
