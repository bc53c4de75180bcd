# SPDX-License-Identifier: Apache-2.0
"""Patch embedding as one matmul, its weights to and from the published convolution, and any convolution like it.

A convolution whose stride is its kernel never overlaps, so it is a matmul over flattened patches. Published vision
encoders store `[H, C, time, height, width]` (Conv3d) or `[H, C, height, width]` (Conv2d). The paper's section 3.1.4
replaces both by matmuls because they were slow in CANN 8.0; later versions of CANN lower the convolution of one patch
to a batched matmul themselves, so `OpsConfig.patch_embed` chooses (docs/design/operators.md).
"""

from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from .backend import chosen, configuration
from .cases import Case, Inputs, case_of
from .errors import OpsError
from .registry import register


def patch_embed(
    patches: Tensor, weight: Tensor, *, bias: Tensor | None = None, kernel: Sequence[int] | None = None
) -> Tensor:
    """Project flattened patches: `[P, K]` and `[H, K]` -> `[P, H]`.

    Args:
        bias: `[H]`.
        kernel: (C, h, w) or (C, t, h, w), K in all; needed where the configuration asks for the convolution.

    Raises:
        OpsError: The convolution is asked for and the kernel is not known.
    """
    as_convolution = configuration().patch_embed == "convolution"
    if as_convolution and kernel is None:
        raise OpsError(
            "patch_embed: kernel: the kernel of the convolution is not known. Give (C, h, w) or (C, t, h, w), or "
            "choose patch_embed: matmul in the configuration of the operators."
        )
    result: Tensor = chosen("patch_embed")(patches, weight, bias, tuple(kernel) if as_convolution and kernel else None)
    return result


def conv_as_matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A convolution whose stride is its kernel, as a matmul: what `conv2d` or `conv3d` gives, padding 0, one group.

    Args:
        x: `[B, C, *S]` with two or three axes S; what does not fill a kernel at the end of an axis is left out.
        weight: `[H, C, *kernel]`.
        bias: `[H]`.

    Returns:
        `[B, H, *(S // kernel)]`, contiguous.
    """
    kernel = tuple(weight.shape[1:])
    patches = unfold_patches(x, kernel)
    flat = patch_embed(patches, conv_weight_to_matmul(weight), bias=bias, kernel=kernel)
    places = [size // k for size, k in zip(x.shape[2:], kernel[1:], strict=True)]
    return flat.view(x.shape[0], -1, weight.shape[0]).transpose(1, 2).reshape(x.shape[0], -1, *places)


def unfold_patches(x: Tensor, kernel: Sequence[int]) -> Tensor:
    """`[B, C, *S]` -> `[B * number of kernels in S, K]`, K in the order of the weight: (C, [t,] h, w)."""
    if x.dim() != len(kernel) + 1 or x.dim() not in (4, 5) or x.shape[1] != kernel[0]:
        raise OpsError(
            f"unfold_patches: x {list(x.shape)} does not fit kernel {tuple(kernel)}. Give [B, C, h, w] and (C, h, w), "
            "or [B, C, t, h, w] and (C, t, h, w)."
        )
    for axis, size in enumerate(kernel[1:], start=2):
        x = x.unfold(axis, size, size)  # [B, C, *places, *kernel]
    axes = len(kernel) - 1
    order = (0, *range(2, 2 + axes), 1, *range(2 + axes, 2 + 2 * axes))
    return x.permute(order).reshape(-1, prod(kernel))


def conv_weight_to_matmul(weight: Tensor) -> Tensor:
    """Conv3d `[H, C, t, h, w]` or Conv2d `[H, C, h, w]` weight -> `[H, K]`, K in the order (C, [t,] h, w)."""
    if weight.dim() not in (4, 5):
        raise OpsError(
            f"conv_weight_to_matmul: weight has shape {list(weight.shape)}. Give [H, C, h, w] or [H, C, t, h, w]."
        )
    return weight.reshape(weight.shape[0], -1)


def matmul_weight_to_conv(weight: Tensor, kernel: Sequence[int]) -> Tensor:
    """`[H, K]` -> `[H, *kernel]`; `kernel` is (C, h, w) or (C, t, h, w)."""
    if len(kernel) not in (3, 4) or weight.dim() != 2 or prod(kernel) != weight.shape[1]:
        raise OpsError(
            f"matmul_weight_to_conv: weight {list(weight.shape)} does not fit kernel {tuple(kernel)}. Its columns "
            "must be C * h * w or C * t * h * w."
        )
    return weight.reshape(weight.shape[0], *kernel)


def project(patches: Tensor, weight: Tensor, bias: Tensor | None, kernel: tuple[int, ...] | None) -> Tensor:
    """The product by PyTorch's matmul, or by its convolution over one kernel where one is given."""
    if kernel is None:
        return F.linear(patches, weight, bias)
    convolution = F.conv2d if len(kernel) == 3 else F.conv3d
    return convolution(patches.view(-1, *kernel), matmul_weight_to_conv(weight, kernel), bias).flatten(1)


@register("patch_embed", "reference")
def patch_embed_reference(
    patches: Tensor, weight: Tensor, bias: Tensor | None, kernel: tuple[int, ...] | None
) -> Tensor:
    """The sum as written."""
    product = torch.einsum("pk,hk->ph", patches, weight)
    return product if bias is None else product + bias


register("patch_embed", "torch")(project)
register("patch_embed", "npu")(project)  # the same PyTorch operators on every device


@case_of("patch_embed")
def _case(inputs: Inputs) -> Case:
    return Case(lambda x, w: patch_embed(x, w), (inputs.normal(inputs.tokens, 96), inputs.normal(64, 96)))
