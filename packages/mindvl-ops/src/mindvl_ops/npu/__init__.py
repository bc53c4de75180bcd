# SPDX-License-Identifier: Apache-2.0
"""Twins of the operators on torch_npu; importing this imports nothing of torch_npu."""

from . import door

__all__ = ["door"]
