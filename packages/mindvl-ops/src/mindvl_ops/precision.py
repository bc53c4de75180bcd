# SPDX-License-Identifier: Apache-2.0
"""The type in which an operator computes: 16-bit inputs are computed in float32 and rounded once at the end."""

import torch
from torch import Tensor


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """float64 stays float64 (gradient checks need it); everything else is computed in float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
