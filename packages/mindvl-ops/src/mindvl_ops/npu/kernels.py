# SPDX-License-Identifier: Apache-2.0
"""All implementations on torch_npu; importing this module registers them."""

from . import adamw, attention, elementwise, moe

__all__ = ["adamw", "attention", "elementwise", "moe"]
