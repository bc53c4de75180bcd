# SPDX-License-Identifier: Apache-2.0
"""Which implementation of each operator runs: read from a recipe, handed to `select_backends`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

BackendName = Literal["reference", "torch", "triton", "npu"]


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """CPU binding and environment variables of every process of a run."""

    # Bind processes to CPU cores. auto: if the machine has accelerators or several NUMA nodes.
    bind_cores: Literal["auto", "on", "off"] = "auto"
    # On NPUs, set environment variables that reduce both device memory and speed (TASK_QUEUE_ENABLE=1 instead of 2).
    memory_tight: bool = False


@dataclass(frozen=True, kw_only=True)
class OpsConfig:
    """Backend of all operators, and exceptions by operator name."""

    # reference: plain PyTorch; torch: PyTorch's fused operators; npu: torch_npu; auto: npu on an NPU, torch elsewhere, on
    # CUDA with the triton kernels of the operators that have one
    backend: Literal["reference", "torch", "npu", "auto"] = "auto"
    # Backend by operator name, such as {swiglu: torch}.
    overrides: Mapping[str, BackendName] = field(default_factory=dict)
    # Implementation of the patch embedding; which one is faster depends on the CANN version.
    patch_embed: Literal["matmul", "convolution"] = "matmul"
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)  # CPU binding and environment variables.
