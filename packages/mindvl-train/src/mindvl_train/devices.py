# SPDX-License-Identifier: Apache-2.0
"""Table of peak device figures: arithmetic, memory, links.

Used by metrics/ (MFU) and by the layout search. Figures are from data sheets, for dense matrices, or from the paper, as
`source` says; none was measured in this project.
"""

import re
from dataclasses import dataclass

import torch

_PAPER = "MindVL paper, Table 10"
_NVIDIA = "NVIDIA data sheet, dense, SXM variant"


@dataclass(frozen=True, kw_only=True)
class Device:
    """Peak figures of one device; GB is 10^9 bytes, bandwidths are per second and per device."""

    name: str  # matched in the driver's device name, without regard to case, blanks and dashes
    bf16_tflops: float  # dense bf16 matrix products
    memory_gb: float
    memory_gb_s: float  # bandwidth of device memory
    link_gb_s: float  # to devices of the same machine, one direction, sum of all links
    network_gb_s: float  # to devices of other machines, one direction
    source: str


# Data sheets give links as the sum of both directions; the table has half of that. The network is that of a common
# server: one port per device, 200 Gbit/s with A100 and 910B, 400 Gbit/s with H100 and later.
DEVICES: tuple[Device, ...] = (
    # The paper gives only the PCIe link (64 GB/s both ways). Servers with HCCS between NPUs are faster: set --link-gb-s.
    Device(
        name="910B1",
        bf16_tflops=400,
        memory_gb=64,
        memory_gb_s=1800,
        link_gb_s=32,
        network_gb_s=25,
        source=_PAPER,
    ),
    Device(
        name="910B2",
        bf16_tflops=376,
        memory_gb=64,
        memory_gb_s=1800,
        link_gb_s=32,
        network_gb_s=25,
        source=_PAPER,
    ),
    Device(
        name="A100",
        bf16_tflops=312,
        memory_gb=80,
        memory_gb_s=2039,
        link_gb_s=300,
        network_gb_s=25,
        source=f"{_PAPER}; 80 GB variant",
    ),
    Device(
        name="A800",
        bf16_tflops=312,
        memory_gb=80,
        memory_gb_s=2039,
        link_gb_s=200,
        network_gb_s=25,
        source=_PAPER,
    ),
    Device(
        name="H100",
        bf16_tflops=989,
        memory_gb=80,
        memory_gb_s=3350,
        link_gb_s=450,
        network_gb_s=50,
        source=_NVIDIA,
    ),
    # The paper gives 600 GB/s of NVLink both ways, NVIDIA's partners 400; the table has the lower value.
    Device(
        name="H800",
        bf16_tflops=989,
        memory_gb=80,
        memory_gb_s=3350,
        link_gb_s=200,
        network_gb_s=50,
        source=f"{_PAPER}, except for the link",
    ),
    Device(
        name="H200",
        bf16_tflops=989,
        memory_gb=141,
        memory_gb_s=4800,
        link_gb_s=450,
        network_gb_s=50,
        source=_NVIDIA,
    ),
    Device(
        name="H20",
        bf16_tflops=148,
        memory_gb=96,
        memory_gb_s=4000,
        link_gb_s=450,
        network_gb_s=50,
        source=_NVIDIA,
    ),
    Device(
        name="B200",
        bf16_tflops=2250,
        memory_gb=180,
        memory_gb_s=8000,
        link_gb_s=900,
        network_gb_s=50,
        source=_NVIDIA,
    ),
    Device(
        name="L40S",
        bf16_tflops=362,
        memory_gb=48,
        memory_gb_s=864,
        link_gb_s=32,
        network_gb_s=25,
        source="NVIDIA data sheet, dense, PCIe card",
    ),
)


def find_device(name: str) -> Device | None:
    """The device of a name from a user or driver, such as "910b2" or "NVIDIA A100-SXM4-80GB"; None: unknown."""
    plain = _plain(name)
    # Match whole words, so that H200 is not H20 and 910B2C is not 910B2; a vendor name may precede without a separator.
    for device in DEVICES:
        if re.search(rf"(?:^|[^a-z0-9]|nvidia|ascend){_plain(device.name)}(?:$|[^a-z0-9])", plain):
            return device
    return None


def name_of(device: torch.device) -> str:
    """Name of a device from its driver; "cpu" for the CPU."""
    if device.type == "cpu":
        return "cpu"
    return str(torch.get_device_module(device).get_device_name(device))


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+", " ", name).strip().lower()
