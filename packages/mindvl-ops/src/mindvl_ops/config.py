# SPDX-License-Identifier: Apache-2.0
"""Which implementation of each operator runs: read from a recipe, handed to `select_backends`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

BackendName = Literal["reference", "torch", "npu"]


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """The host side of every process of a run."""

    bind_cores: Literal["auto", "on", "off"] = "auto"  # auto: where there are devices, or several NUMA nodes
    memory_tight: bool = False  # launch variables that need less device memory, a little slower


@dataclass(frozen=True, kw_only=True)
class OpsConfig:
    """Backend of all operators, and exceptions by operator name."""

    # reference: plain PyTorch; torch: PyTorch's fused operators; npu: torch_npu; auto: npu on an NPU, torch elsewhere
    backend: BackendName | Literal["auto"] = "auto"
    overrides: Mapping[str, BackendName] = field(default_factory=dict)  # operator name -> backend
    patch_embed: Literal["matmul", "convolution"] = "matmul"  # the faster of the two depends on the version of CANN
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)  # launch variables and cores
