# SPDX-License-Identifier: Apache-2.0
"""Make Tensor.type() report CUDA names on other devices, as megatron-core expects.

Its optimizers and gradient clipping compare the string with "torch.cuda.FloatTensor"; transfer_to_npu does not map it.
"""

from typing import Any

import torch


def report_cuda_tensor_types(backend: str) -> None:
    """Rename "torch.<backend>X" to "torch.cuda.X" in Tensor.type(). The backend is "" on the CPU, "npu." on an NPU."""
    original = torch.Tensor.type

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        return result.replace(f"torch.{backend}", "torch.cuda.", 1) if isinstance(result, str) else result

    torch.Tensor.type = type_name  # type: ignore[method-assign,assignment]
