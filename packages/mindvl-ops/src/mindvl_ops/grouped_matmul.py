# SPDX-License-Identifier: Apache-2.0
"""One matmul for each group of rows: contract and reference. Comes between `moe_permute` and `moe_unpermute`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .backend import chosen
from .cases import Case, Inputs, case_of
from .errors import OpsError
from .registry import register

GroupSizes = Sequence[int] | Tensor


def grouped_matmul(x: Tensor, weight: Tensor, sizes: GroupSizes) -> Tensor:
    """Rows of `x` in groups, each times its own matrix.

    The three products (`y = x w`, `dx = dy w^T`, `dw = x^T dy`, each by group) are accumulated in float32 and rounded
    once; the weight of an empty group gets a gradient of zeros.

    Args:
        x: `[M, K]`, groups end to end.
        weight: `[E, K, N]`, one matrix for each group.
        sizes: Rows of each group, adding up to M: numbers on the host, or `[E]` int64 on the device of `x`, which is
            then not read on the host by backends that need not (torch in bfloat16 on CUDA, npu). With E + 1 sizes the
            last one counts padding rows without a matrix: their results and gradients are zeros, whatever they hold.

    Returns:
        `[M, N]` in the type of `x`.

    Raises:
        OpsError: Shapes or sizes that do not agree.
    """
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[1] or len(sizes) - len(weight) not in (0, 1):
        raise OpsError(
            f"grouped_matmul: x {list(x.shape)}, weight {list(weight.shape)}, {len(sizes)} sizes do not agree. Give "
            "[M, K], [E, K, N] and E sizes, or E + 1 with padding rows at the end."
        )
    if not isinstance(sizes, Tensor):
        _check_sizes(sizes, len(x))
    if x.dtype != weight.dtype:
        raise OpsError(f"grouped_matmul: x is {x.dtype}, weight {weight.dtype}. Give one type.")
    result: Tensor = chosen("grouped_matmul")(x, weight, sizes)
    return result


def host_sizes(sizes: GroupSizes, num_rows: int) -> list[int]:
    """Sizes as numbers; waits for the device if they lie there.

    Raises:
        OpsError: They do not add up to the number of rows.
    """
    if not isinstance(sizes, Tensor):
        return list(sizes)
    numbers: list[int] = sizes.tolist()
    _check_sizes(numbers, num_rows)
    return numbers


def clear_padding(rows: Tensor, num_rows: Tensor) -> Tensor:
    """Set the rows `[M, N]` from `num_rows` on to zero in place: a kernel leaves them as the allocator gave them.

    Args:
        num_rows: Scalar on the device, which the host does not read.
    """
    return rows.masked_fill_((torch.arange(len(rows), device=rows.device) >= num_rows)[:, None], 0)


def _check_sizes(sizes: Sequence[int], num_rows: int) -> None:
    if sum(sizes) != num_rows or min(sizes, default=0) < 0:
        raise OpsError(f"grouped_matmul: sizes {list(sizes)} do not add up to {num_rows} rows. Count the rows again.")


@register("grouped_matmul", "reference")
def grouped_matmul_reference(x: Tensor, weight: Tensor, sizes: GroupSizes) -> Tensor:
    """Group after group."""
    pieces = x.split(host_sizes(sizes, len(x)))
    products = [rows @ w for rows, w in zip(pieces, weight, strict=False)]  # one more piece if there are padding rows
    padding = len(x) - sum(map(len, products))
    return torch.cat([*products, x.new_zeros(padding, weight.shape[2])])


@case_of("grouped_matmul")
def _case(inputs: Inputs) -> Case:
    groups, num_rows = 16, 2 * inputs.tokens
    sizes = torch.bincount(torch.randint(0, groups, (num_rows,), generator=inputs.generator), minlength=groups)
    tensors = (inputs.normal(num_rows, 32), inputs.normal(groups, 32, 48))
    return Case(lambda x, w: grouped_matmul(x, w, sizes.to(x.device)), tensors)
