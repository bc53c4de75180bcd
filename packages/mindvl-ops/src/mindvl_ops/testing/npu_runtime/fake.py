# SPDX-License-Identifier: Apache-2.0
"""Prepare the imported torch_npu wheel for fake tensors over the stub runtime."""

import importlib

import torch

from ...npu.extension import torch_npu


def prepare_fake_npu() -> None:
    """Answer what the wheel would ask the driver for; call after torch_npu is imported over the stub."""
    wheel = torch_npu()
    registrations = importlib.import_module("torch_npu.op_plugin.meta._meta_registrations")
    registrations._npu_fusion_attention_warning_printed = True  # type: ignore[attr-defined]  # names the chip
    current = _first_device
    wheel.npu.current_device = torch.cuda.current_device = current
    torch.npu.current_device = current  # type: ignore[attr-defined]


def _first_device() -> int:
    return 0
