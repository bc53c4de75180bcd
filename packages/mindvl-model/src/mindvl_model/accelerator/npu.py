# SPDX-License-Identifier: Apache-2.0
"""Let the literal "cuda" mean the NPU by torch_npu's own transfer_to_npu, and close the gaps it leaves.

Comes before the first import of megatron-core. Not run on hardware yet: proved on the real torch_npu wheel with fake
tensors by `nox -s npu_contract`, which runs whole training steps. The gaps: Tensor.type() strings, which
transfer_to_npu leaves alone, and questions put to torch.cuda because an NPU tensor says `is_cuda` (docs/npu.md).
"""

import importlib
from typing import Any

import torch

from mindvl_model.accelerator.tensor_type import answer_with_cuda_names

# What torch.cuda answers on an A100: everything that asks uses it to find features of later GPUs (fp8 from 8.9 on).
_CAPABILITY = (8, 0)


def let_cuda_mean_npu() -> None:
    """Apply transfer_to_npu; call once, before megatron-core."""
    importlib.import_module("torch_npu.contrib.transfer_to_npu")
    answer_with_cuda_names("npu.")
    # torch.distributed.broadcast reads the first number for every tensor that says is_cuda; torch_npu answers None
    # unless TORCH_NPU_DEVICE_CAPABILITY is set, and the first training step would end in a TypeError.
    torch.cuda.get_device_capability = _device_capability


def _device_capability(device: Any = None) -> tuple[int, int]:
    return _CAPABILITY
