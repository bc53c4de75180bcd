# SPDX-License-Identifier: Apache-2.0
"""npu_grouped_matmul in its three groupings and both overloads, and the accumulating npu_grouped_matmul_add.

No derivative. Sums in float32, one rounding.
"""

from typing import Any

import torch
from torch import Tensor

from .elementwise import check_float
from .operators import operator
from .state import refuse, strict

_OP = "npu_grouped_matmul"
_UNQUANTISED = (
    *("scale", "offset", "antiquant_scale", "antiquant_offset", "per_token_scale", "activation_input"),
    *("activation_quant_scale", "activation_quant_offset", "tuning_config"),
)
_BIAS_OF = {torch.float16: torch.float16, torch.bfloat16: torch.float32, torch.float32: torch.float32}
MAX_INNER = 65535


def is_transposed(matrix: Tensor) -> bool:
    """Whether the last two axes are a dense transposed view; also true where a size of 1 leaves it open."""
    rows, columns = matrix.shape[-2:]
    return min(rows, columns) <= 1 or (matrix.stride(-2) == 1 and matrix.stride(-1) == rows)


def _check_common(x: list[Tensor], weight: list[Tensor], bias: list[Tensor] | None, act_type: int, rest: Any) -> None:
    refuse(not x or not weight, f"{_OP}: The number of x and weight should be greater than 0")
    for name, tensors in (("x", x), ("weight", weight)):
        for tensor in tensors:
            check_float(_OP, name, tensor)
            refuse(tensor.dtype != x[0].dtype, f"{_OP}: types differ, {x[0].dtype} and {tensor.dtype}")
            refuse(tensor.shape[-1] > MAX_INNER, f"{_OP}: last axis of {name} {tensor.shape[-1]} is above {MAX_INNER}")
    for name in _UNQUANTISED:
        refuse(rest.get(name) is not None, f"{_OP}: {name} is for quantised tensors")
    refuse(act_type != 0, f"{_OP}: act_type must be 0, got {act_type}")
    for tensor in bias or ():
        refuse(tensor.dtype != _BIAS_OF[x[0].dtype], f"{_OP}: bias is {tensor.dtype}, must be {_BIAS_OF[x[0].dtype]}")


def _sizes(group_list: Tensor, group_list_type: int, total: int) -> list[int]:
    """Sizes of the groups; refuses what adds up to more than `total`."""
    refuse(group_list.dtype != torch.int64, f"{_OP}: group_list is {group_list.dtype}, must be int64")
    refuse(group_list.dim() != 1, f"{_OP}: group_list has rank {group_list.dim()}, must be 1")
    refuse(not 1 <= len(group_list) <= 1024, f"{_OP}: {len(group_list)} groups, at most 1024")
    refuse(group_list_type not in (0, 1), f"{_OP}: group_list_type {group_list_type} is neither 0 nor 1")
    values = group_list.tolist()
    sizes = values if group_list_type == 1 else _differences(values)
    kind = "sizes" if group_list_type == 1 else "cumulative ends"
    refuse(min(sizes) < 0 or sum(sizes) > total, f"{_OP}: group_list {values} ({kind}) must add up to at most {total}")
    return sizes


def _differences(ends: list[int]) -> list[int]:
    return [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _rules(
    x: list[Tensor],
    weight: list[Tensor],
    bias: list[Tensor] | None,
    group_list: Tensor | None,
    split_item: int | None,
    group_type: int | None,
    group_list_type: int | None,
    act_type: int | None,
    **rest: Any,
) -> None:
    refuse(group_type not in (-1, 0, 2), f"group_type only supports -1, 0 and 2, but got {group_type}")
    refuse(split_item not in (0, 1, 2, 3), f"{_OP}: split_item {split_item} is outside 0 to 3")
    _check_common(x, weight, bias, act_type or 0, rest)
    if group_type == -1:
        refuse(split_item not in (0, 1), f"{_OP}: group_type -1 needs split_item 0 or 1, got {split_item}")
        refuse(group_list is not None, f"{_OP}: group_type -1 takes no group_list")
        _check_lists(x, weight)
        return
    refuse(split_item not in (2, 3), f"{_OP}: group_type {group_type} needs split_item 2 or 3, got {split_item}")
    refuse(group_list is None, f"{_OP}: group_type {group_type} needs a group_list")
    refuse(len(x) != 1 or len(weight) != 1, f"{_OP}: group_type {group_type} takes one x and one weight")
    refuse(x[0].dim() != 2, f"{_OP}: x has rank {x[0].dim()}, must be [M, K]")
    assert group_list is not None
    if group_type == 0:
        _check_rows_grouped(x[0], weight[0], group_list, group_list_type or 0)
    else:
        _check_inner_grouped(x[0], weight[0], group_list, group_list_type or 0, bias)


def _check_lists(x: list[Tensor], weight: list[Tensor]) -> None:
    refuse(len(x) != len(weight) or len(x) > 128, f"{_OP}: {len(x)} x and {len(weight)} weights, at most 128 of each")
    for left, right in zip(x, weight, strict=True):
        refuse(not 2 <= left.dim() <= 6, f"{_OP}: x has rank {left.dim()}, must be 2 to 6")
        refuse(right.dim() != 2, f"{_OP}: weight has rank {right.dim()}, must be 2")
        refuse(left.shape[-1] != right.shape[0], f"{_OP}: x {list(left.shape)} times weight {list(right.shape)}")


def _check_rows_grouped(x: Tensor, weight: Tensor, group_list: Tensor, group_list_type: int) -> None:
    refuse(weight.dim() != 3, f"{_OP}: weight has rank {weight.dim()}, must be [E, K, N]")
    refuse(x.shape[1] != weight.shape[1], f"{_OP}: x {list(x.shape)} times weight {list(weight.shape)}")
    refuse(
        is_transposed(x) and not x.is_contiguous(),
        f"{_OP}: group_type 0 takes no transposed view as x, strides {list(x.stride())}",
    )
    _sizes(group_list, group_list_type, len(x))
    refuse(len(group_list) != len(weight), f"{_OP}: {len(group_list)} groups for {len(weight)} weights")


def _check_inner_grouped(
    x: Tensor, weight: Tensor, group_list: Tensor, group_list_type: int, bias: list[Tensor] | None
) -> None:
    refuse(bool(bias), f"{_OP}: group_type 2 takes no bias")
    refuse(weight.dim() != 2, f"{_OP}: weight has rank {weight.dim()}, must be [K, N]")
    refuse(x.shape[1] != weight.shape[0], f"{_OP}: x {list(x.shape)} times weight {list(weight.shape)}")
    refuse(not is_transposed(x), f"{_OP}: group_type 2 needs x as a transposed view, strides {list(x.stride())}")
    _sizes(group_list, group_list_type, x.shape[1])


@operator(_OP, rules=_rules)
def grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    bias: list[Tensor] | None,
    group_list: Tensor | None,
    group_type: int,
    group_list_type: int | None,
    **_: Any,
) -> list[Tensor]:
    """One product per pair, per group of rows, or per group of the inner axis."""
    if group_list is None:
        return [_product(left, weight[e], bias[e] if bias else None) for e, left in enumerate(x)]
    total = len(x[0]) if group_type == 0 else x[0].shape[1]
    sizes = _sizes(group_list, group_list_type or 0, total)
    used = sum(sizes)
    if group_type == 2:
        return [_inner_products(x[0][:, :used], weight[0][:used], sizes)]
    rows = x[0][:used].split(sizes)
    biases = list(bias[0]) if bias and bias[0].dim() == 2 else bias
    products = [_product(part, weight[0][e], biases[e] if biases else None) for e, part in enumerate(rows)]
    # Rows after the last group are not written: here they are NaN, so that a result that depends on them shows it.
    return [torch.cat([*products, x[0].new_full((total - used, weight[0].shape[2]), torch.nan)])]


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    wide = x.float() @ weight.float()
    return (wide if bias is None else wide + bias.float()).to(x.dtype)


def _inner_products(x: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
    """`[E, M, N]`; an empty group gives zeros."""
    pairs = zip(x.float().split(sizes, dim=1), weight.float().split(sizes), strict=True)
    return torch.stack([left @ right for left, right in pairs]).to(x.dtype)


def _list_rules(
    x: list[Tensor],
    weight: list[Tensor],
    bias: list[Tensor] | None,
    group_list: list[int] | None,
    split_item: int | None,
    group_type: int | None,
    act_type: int | None,
    **rest: Any,
) -> None:
    refuse(group_type is not None, f"{_OP}: with group_list as a list group_type must be left out, got {group_type}")
    refuse(split_item not in (0, 1, 2, 3), f"{_OP}: split_item {split_item} is outside 0 to 3")
    _check_common(x, weight, bias, act_type or 0, rest)
    if group_list is None:
        _check_lists(x, weight)
        return
    refuse(len(group_list) > 128, f"{_OP}: {len(group_list)} groups in a list, at most 128")
    refuse(len(x) != 1 or x[0].dim() != 2, f"{_OP}: a group_list needs one x [M, K]")
    sizes = _differences(group_list)
    refuse(min(sizes) < 0 or sum(sizes) != len(x[0]), f"{_OP}: group_list {group_list} must end at {len(x[0])}")
    matrices = weight if len(weight) > 1 or weight[0].dim() == 2 else list(weight[0])
    refuse(len(matrices) != len(sizes), f"{_OP}: {len(sizes)} groups for {len(matrices)} weights")


@operator(f"{_OP}.List", rules=_list_rules)
def grouped_matmul_list(
    x: list[Tensor],
    weight: list[Tensor],
    bias: list[Tensor] | None,
    group_list: list[int] | None,
    split_item: int | None,
    **_: Any,
) -> list[Tensor]:
    """Groups of rows by cumulative ends on the host; many outputs for split_item 0 and 1, one for 2 and 3."""
    if group_list is None:
        parts = x
        matrices = weight
    else:
        parts = list(x[0].split(_differences(group_list)))
        matrices = weight if len(weight) > 1 or weight[0].dim() == 2 else list(weight[0])
    products = [_product(part, matrices[e], bias[e] if bias else None) for e, part in enumerate(parts)]
    return products if split_item in (0, 1) else [torch.cat(products)]


def _add_rules(
    input: Tensor,
    x: Tensor,
    weight: Tensor,
    group_list: Tensor,
    transpose_x: bool,
    transpose_weight: bool,
    group_type: int,
    group_list_type: int | None,
) -> None:
    op = "npu_grouped_matmul_add"
    refuse(group_type != 2, f"group_type only supports 2, but got {group_type}")
    refuse(not transpose_x or transpose_weight, f"{op}: transpose_x must be True and transpose_weight False")
    refuse(input.dtype != torch.float32 or input.dim() != 3, f"{op}: input must be float32 [E, M, N]")
    half = (torch.float16, torch.bfloat16)
    refuse(x.dtype not in half or weight.dtype != x.dtype, f"{op}: x and weight must share a 16-bit type")
    wanted = (len(group_list), x.shape[1], weight.shape[1])
    refuse(tuple(input.shape) != wanted, f"{op}: input {list(input.shape)} must be {list(wanted)}")
    refuse(len(x) != len(weight), f"{op}: x {list(x.shape)} and weight {list(weight.shape)} differ in rows")
    refuse(
        group_list_type != 0 and strict().cumulative_groups,
        f"{op}: group_list_type {group_list_type} is ignored on this device, pass cumulative ends",
    )
    sizes = _sizes(group_list, 0, len(x))
    refuse(sum(sizes) != len(x), f"{op}: group_list {group_list.tolist()} must end at {len(x)}")


@operator("npu_grouped_matmul_add", rules=_add_rules)
def grouped_matmul_add(input: Tensor, x: Tensor, weight: Tensor, group_list: Tensor, **_: Any) -> Tensor:
    """input + x^T weight of every group."""
    sizes = _differences(group_list.tolist())
    pairs = zip(x.float().split(sizes), weight.float().split(sizes), strict=True)
    return input + torch.stack([left.T @ right for left, right in pairs])


@operator("npu_grouped_matmul_add_", rules=_add_rules)
def grouped_matmul_add_(input: Tensor, x: Tensor, weight: Tensor, group_list: Tensor, **_: Any) -> Tensor:
    """The same, into input."""
    return input.copy_(grouped_matmul_add(input, x, weight, group_list))
