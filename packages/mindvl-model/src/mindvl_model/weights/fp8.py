# SPDX-License-Identifier: Apache-2.0
"""Dequantize the block-scaled fp8 weights of DeepSeek-V3 to bfloat16.

Used by directory.py. Format: NAME holds float8_e4m3fn [out, in], NAME_scale_inv float32 with one scale for each block
of 128 x 128 (weight_block_size); value = stored * scale (DeepSeek-V3, inference/fp8_cast_bf16.py).
"""

import torch
from torch import Tensor

SCALE_SUFFIX = "_scale_inv"
STORED_AS = "F8_E4M3"
BLOCK = (128, 128)


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Shape of the scales of a weight [out, in]."""
    return tuple(-(-size // length) for size, length in zip(shape, block, strict=True))


def dequantize(
    values: Tensor, scales: Tensor, block: tuple[int, int] = BLOCK, first_row: int = 0, first_column: int = 0
) -> Tensor:
    """Dequantize a block of rows and columns of a weight, one row of scale blocks at a time.

    Args:
        values: float8 [rows, columns], starting at (first_row, first_column) of the whole weight.
        scales: float32 scales of the whole weight.
        block: Rows and columns that share one scale.
        first_row: Index of the first row in the whole weight.
        first_column: Index of the first column in the whole weight.
    """
    rows, columns = values.shape
    result = torch.empty(rows, columns, dtype=torch.bfloat16)
    of_column = torch.arange(first_column, first_column + columns) // block[1]
    start = 0
    while start < rows:
        strip = (first_row + start) // block[0]
        end = min(rows, (strip + 1) * block[0] - first_row)
        # Multiply in float32, so that the result is rounded once.
        result[start:end] = values[start:end].float() * scales[strip].float()[of_column]
        start = end
    return result
