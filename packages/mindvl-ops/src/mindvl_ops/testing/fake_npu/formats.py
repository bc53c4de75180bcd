# SPDX-License-Identifier: Apache-2.0
"""Storage formats and casts. A format changes neither values nor shape; the simulator remembers the last one given."""

from enum import IntEnum

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

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


_formats = WeakTensorKeyDictionary()

# number of a torch type in a schema's int argument
_TYPES = {
    0: torch.uint8,
    1: torch.int8,
    2: torch.int16,
    3: torch.int32,
    4: torch.int64,
    5: torch.float16,
    6: torch.float32,
    7: torch.float64,
    11: torch.bool,
    15: torch.bfloat16,
}


def format_of(tensor: Tensor) -> int:
    """The format given to `tensor` by npu_format_cast; ND otherwise (NCHW for four axes)."""
    plain = Format.NCHW if tensor.dim() == 4 else Format.ND
    return int(_formats.get(tensor, plain))


@operator(
    "npu_format_cast",
    rules=lambda acl_format, **_: refuse(
        acl_format not in set(Format), f"npu_format_cast: {acl_format} is no format, known are {list(Format)}"
    ),
)
def format_cast(input: Tensor, acl_format: int, customize_dtype: int | None, input_dtype: int | None) -> Tensor:
    """The same values in another format."""
    result = input.clone()
    _formats[result] = acl_format
    return result


@operator(
    "npu_dtype_cast",
    rules=lambda dtype, **_: refuse(dtype not in _TYPES, f"npu_dtype_cast: {dtype} is the number of no known type"),
    learns=("input",),
)
def dtype_cast(input: Tensor, dtype: int, input_dtype: int | None) -> Tensor:
    """The same values in another type."""
    return input.to(_TYPES[dtype], copy=True)


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
