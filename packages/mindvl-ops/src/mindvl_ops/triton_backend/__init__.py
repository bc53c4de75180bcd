# SPDX-License-Identifier: Apache-2.0
"""Fused Triton kernels for CUDA; importing this package neither registers them nor imports triton."""

from . import installed

__all__ = ["installed"]
