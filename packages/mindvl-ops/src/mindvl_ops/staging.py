# SPDX-License-Identifier: Apache-2.0
"""Copies of small host tensors to the device that do not make the host wait.

Used for everything that is computed on the host once per packed sequence: orders, positions, cumulative lengths. A copy
from pageable memory waits for all kernels before it, also with non_blocking=True; one from pinned memory is queued.
"""

import torch
from torch import Tensor


def to_device(host: Tensor, device: torch.device | str) -> Tensor:
    """A copy on `device`, queued on the current stream; `host` itself if `device` is the CPU.

    The pinned memory belongs to PyTorch's host allocator, which reuses it only after the copy is done.

    Args:
        host: A tensor on the CPU; it must not be changed afterwards.
    """
    device = torch.device(device)
    if device.type in ("cuda", "npu") and torch.accelerator.is_available():  # not with fake tensors on another machine
        host = host.pin_memory()
    return host.to(device, non_blocking=True)
