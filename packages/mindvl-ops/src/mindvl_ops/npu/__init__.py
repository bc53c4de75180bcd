# SPDX-License-Identifier: Apache-2.0
"""Implementations of the operators on torch_npu; importing this package does not import torch_npu."""

from . import extension

__all__ = ["extension"]
