# SPDX-License-Identifier: Apache-2.0
"""All twins on torch_npu; importing this enters them in the registry.

Three operators are the same PyTorch code on every device and are entered here for npu as they are: torch_npu has no
operator that keeps their memory promise, or the plain one is already the device's own.
"""

from ..patch_embed import project
from ..registry import register
from ..torch_backend.loss import cross_entropy_torch, linear_cross_entropy_torch
from . import adamw, attention, elementwise, moe

__all__ = ["adamw", "attention", "elementwise", "moe"]

register("cross_entropy", "npu")(cross_entropy_torch)
register("linear_cross_entropy", "npu")(linear_cross_entropy_torch)
register("patch_embed", "npu")(project)
