# SPDX-License-Identifier: Apache-2.0
"""Map the device name "cuda" to the NPU with torch_npu's transfer_to_npu, and patch what it does not cover.

Applied before the first import of megatron-core. Not yet run on hardware: `nox -s npu_contract` runs whole training
steps with the real torch_npu wheel and fake tensors. Not covered by transfer_to_npu: Tensor.type() strings, and
calls to torch.cuda that torch makes because is_cuda is True for an NPU tensor (docs/design/npu.md).
"""

import importlib
from typing import Any

import torch

from mindvl_model.accelerator.tensor_type import report_cuda_tensor_types

# Compute capability of an A100. Callers use it to detect features of later GPUs (fp8 needs 8.9).
_CAPABILITY = (8, 0)


def map_cuda_to_npu() -> None:
    """Apply transfer_to_npu; call once, before megatron-core."""
    importlib.import_module("torch_npu.contrib.transfer_to_npu")
    report_cuda_tensor_types("npu.")
    # torch.distributed.broadcast reads the first number for every tensor with is_cuda=True. torch_npu returns None
    # unless TORCH_NPU_DEVICE_CAPABILITY is set, and the first training step would raise a TypeError.
    torch.cuda.get_device_capability = _device_capability


def _device_capability(device: Any = None) -> tuple[int, int]:
    return _CAPABILITY
