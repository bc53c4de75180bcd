# SPDX-License-Identifier: Apache-2.0
"""The cast of storage formats, which changes neither values nor shape, and the deprecated convolution."""

from enum import IntEnum

import torch.nn.functional as F
from torch import Tensor

from .operators import operator
from .state import refuse


class Format(IntEnum):
    """Numbers of the storage formats, as in torch_npu.Format."""

    NCHW = 0
    NHWC = 1
    ND = 2
    NC1HWC0 = 3
    FRACTAL_Z = 4
    NDHWC = 27
    FRACTAL_NZ = 29
    NCDHW = 30
    NDC1HWC0 = 32
    FRACTAL_Z_3D = 33


@operator(
    "npu_format_cast",
    rules=lambda acl_format, **_: refuse(
        acl_format not in set(Format), f"npu_format_cast: {acl_format} is no format, known are {list(Format)}"
    ),
)
def format_cast(input: Tensor, acl_format: int, customize_dtype: int | None, input_dtype: int | None) -> Tensor:
    """The same values in another format."""
    return input.clone()


def _conv3d_rules(input: Tensor, weight: Tensor, stride: list[int], groups: int, **_: object) -> None:
    refuse(input.dim() != 5 or weight.dim() != 5, "npu_conv3d: input and weight must have rank 5")
    refuse(len(stride) != 3, f"npu_conv3d: stride {stride} must have three values")
    refuse(input.shape[1] != weight.shape[1] * groups, f"npu_conv3d: {input.shape[1]} channels do not fit the weight")


@operator("npu_conv3d", rules=_conv3d_rules)
def conv3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    """Convolution; deprecated, every argument is required."""
    wide = F.conv3d(
        input.float(), weight.float(), None if bias is None else bias.float(), stride, padding, dilation, groups
    )
    return wide.to(input.dtype)
