# SPDX-License-Identifier: Apache-2.0
"""Patch embedding as one matmul, and its weights to and from the published convolution.

A convolution whose stride is its kernel never overlaps, so it is a matmul over flattened patches. Published vision
towers store `[H, C, time, height, width]` (Conv3d) or `[H, C, height, width]` (Conv2d).
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from .backend import chosen
from .errors import OpsError
from .registry import register


def patch_embed(patches: Tensor, weight: Tensor) -> Tensor:
    """Project flattened patches: `[P, K]` and `[H, K]` -> `[P, H]`."""
    result: Tensor = chosen("patch_embed")(patches, weight)
    return result


def conv_weight_to_matmul(weight: Tensor) -> Tensor:
    """Conv3d `[H, C, t, h, w]` or Conv2d `[H, C, h, w]` weight -> `[H, K]`, K in the order (C, [t,] h, w)."""
    if weight.dim() not in (4, 5):
        raise OpsError(
            f"weight has shape {list(weight.shape)}. conv_weight_to_matmul. Give [H, C, h, w] or [H, C, t, h, w]."
        )
    return weight.reshape(weight.shape[0], -1)


def matmul_weight_to_conv(weight: Tensor, kernel: Sequence[int]) -> Tensor:
    """`[H, K]` -> `[H, *kernel]`; `kernel` is (C, h, w) or (C, t, h, w)."""
    if len(kernel) not in (3, 4) or weight.dim() != 2 or prod(kernel) != weight.shape[1]:
        raise OpsError(
            f"weight {list(weight.shape)} does not fit kernel {tuple(kernel)}. matmul_weight_to_conv. Its "
            "columns must be C * h * w or C * t * h * w."
        )
    return weight.reshape(weight.shape[0], *kernel)


@register("patch_embed", "reference")
def patch_embed_reference(patches: Tensor, weight: Tensor) -> Tensor:
    """The sum as written."""
    return torch.einsum("pk,hk->ph", patches, weight)
