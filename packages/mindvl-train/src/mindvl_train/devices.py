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


@dataclass(frozen=True)
class Device:
    """Peak figures of one device; GB is 10^9 bytes, bandwidths are per second and per device."""

    name: str  # matched in the driver's device name, without regard to case, blanks and dashes
    bf16_tflops: float  # dense bf16 matrix products
    memory_gb: float
    memory_gb_s: float  # bandwidth of device memory
    link_gb_s: float  # to devices of the same machine, one direction, sum of all links
    network_gb_s: float  # to devices of other machines, one direction
    source: str
    capability: tuple[int, int] | None = None  # CUDA compute capability; None: not a CUDA device


# Data sheets give links as the sum of both directions; the table has half of that. The network is that of a common
# server: one port per device, 200 Gbit/s with A100 and 910B, 400 Gbit/s with H100 and later.
DEVICES: tuple[Device, ...] = (
    # name, bf16 TFLOP/s, memory in GB, memory, link and network in GB/s, source
    # The paper gives only the PCIe link (64 GB/s both ways). Servers with HCCS between NPUs are faster: set --link-gb-s.
    Device("910B1", 400,  64,  1800, 32,  25, _PAPER),
    Device("910B2", 376,  64,  1800, 32,  25, _PAPER),
    Device("A100", 312,  80,  2039, 300, 25, f"{_PAPER}; 80 GB variant", (8, 0)),
    Device("A800", 312,  80,  2039, 200, 25, _PAPER, (8, 0)),
    Device("H100", 989,  80,  3350, 450, 50, _NVIDIA, (9, 0)),
    # The paper gives 600 GB/s of NVLink both ways, NVIDIA's partners 400; the table has the lower value.
    Device("H800", 989,  80,  3350, 200, 50, f"{_PAPER}, except for the link", (9, 0)),
    Device("H200", 989,  141, 4800, 450, 50, _NVIDIA, (9, 0)),
    Device("H20",  148,  96,  4000, 450, 50, _NVIDIA, (9, 0)),
    Device("B200", 2250, 180, 8000, 900, 50, _NVIDIA, (10, 0)),
    # 24 GiB, of which the driver reports 24,564 MiB.
    Device("RTX 4090", 165, 25.7, 1008, 32, 25, "NVIDIA white paper of the Ada architecture, dense, PCIe card", (8, 9)),
    Device("L40S", 362,  48,  864,  32,  25, "NVIDIA data sheet, dense, PCIe card", (8, 9)),
)  # fmt: skip


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
