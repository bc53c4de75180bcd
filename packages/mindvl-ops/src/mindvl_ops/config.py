# SPDX-License-Identifier: Apache-2.0
"""Which implementation of each operator runs: read from a recipe, handed to `select_backends`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

BackendName = Literal["reference", "torch", "npu"]


@dataclass(frozen=True, kw_only=True)
class OpsConfig:
    """Backend of all operators, and exceptions by operator name."""

    backend: BackendName = "torch"  # reference: plain PyTorch; torch: PyTorch's fused operators; npu: torch_npu
    overrides: Mapping[str, BackendName] = field(default_factory=dict)  # operator name -> backend
    patch_embed: Literal["matmul", "convolution"] = "matmul"  # the faster of the two depends on the version of CANN
