# SPDX-License-Identifier: Apache-2.0
"""Tensor.type() as megatron-core expects it, on devices that are not CUDA.

Its optimizers and gradient clipping compare the string with "torch.cuda.FloatTensor"; transfer_to_npu leaves it alone.
"""

from typing import Any

import torch


def answer_with_cuda_names(backend: str) -> None:
    """Rename "torch.<backend>X" to "torch.cuda.X" in Tensor.type(); backend is "" on the CPU and "npu." on an NPU."""
    original = torch.Tensor.type

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        return result.replace(f"torch.{backend}", "torch.cuda.", 1) if isinstance(result, str) else result

    torch.Tensor.type = type_name  # type: ignore[method-assign,assignment]
