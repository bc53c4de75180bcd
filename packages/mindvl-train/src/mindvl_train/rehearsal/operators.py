# SPDX-License-Identifier: Apache-2.0
"""What one call of an operator costs: floating-point operations, bytes read and written, and whether the device has it.

From the shapes of arguments and results alone; called once for each operator and combination of shapes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


@dataclass(frozen=True)
class Cost:
    """Cost of one call."""

    flops: float
    bytes_read: float
    bytes_written: float


FREE = Cost(0.0, 0.0, 0.0)
HOST_COPY = "host_copy"  # attribute of a fake tensor: the host tensor that it was copied from
# Operators that only make or describe a tensor.
_NO_KERNEL = tuple(
    f"aten::{name}"
    for name in ("_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_")
)


def cost_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Cost:
    """Cost of a call with these arguments and this result; views are free."""
    if func.is_view or func.namespace == "prim" or func._schema.name in _NO_KERNEL:
        return FREE
    given = _tensors((args, kwargs))
    made = _tensors(result)
    written = sum(map(_bytes, made))
    changed = {id(tensor) for tensor in made}
    in_place = func._schema.is_mutable and any(id(tensor) in changed for tensor in given)
    overwrites = func._schema.name in ("aten::copy_", "aten::fill_", "aten::zero_") or func._overloadname == "out"
    read = sum(_bytes(tensor) for tensor in given if not (in_place and overwrites and id(tensor) in changed))
    return Cost(_flops(func, args, kwargs, result), float(read), float(written))


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _bytes(tensor: Tensor) -> int:
    """Bytes of the elements that exist; expanded axes are read once."""
    return math.prod(n for n, step in zip(tensor.shape, tensor.stride(), strict=True) if step) * tensor.itemsize


def _flops(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> float:
    name = func._schema.name
    if name in ("npu::npu_grouped_matmul", "npu::npu_grouped_matmul.List"):
        return _grouped_matmul(args, kwargs)
    if name.startswith("npu::npu_fusion_attention"):
        return _npu_attention(func, args, kwargs)
    if name in ("torch_attn::_varlen_attn", "torch_attn::_varlen_attn_backward"):
        return _varlen_attention(func, args, kwargs)
    if name in ("aten::matmul", "aten::linear"):  # composite elsewhere; torch_npu keeps them
        left, right = args[0], args[1].t() if name == "aten::linear" else args[1]
        return _matmul(left, right)
    if name == "aten::matmul_backward":
        return sum(args[3]) * _matmul(args[1], args[2])
    if name == "aten::_grouped_mm":
        return _product(args[0], args[1])
    formula = flop_registry.get(func.overloadpacket)
    if formula is None:
        return 0.0
    return float(formula(*args, **kwargs, out_val=result))


def _grouped_matmul(args: Sequence[Any], kwargs: dict[str, Any]) -> float:
    rows, weights = (
        kwargs.get(name, args[place] if place < len(args) else ()) for place, name in enumerate(("x", "weight"))
    )
    return sum(_product(left, right) for left, right in zip(rows, weights, strict=False))


def _matmul(left: Tensor, right: Tensor) -> float:
    return 2.0 * left.numel() * (right.shape[-1] if right.ndim > 1 else 1)


def _product(left: Tensor, right: Tensor) -> float:
    """Rows [M, K] times matrices [E, K, N], each row with one of them; or the gradient [K, M] x [M, N]."""
    return 2.0 * left.shape[-2] * left.shape[-1] * right.shape[-1]


def _npu_attention(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> float:
    """Query-key pairs of the segments; half of them with a causal mask. Backward recomputes: 5 products for 2."""
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    query, value = given["query"], given["value"]
    heads, size, value_size = query.shape[-2], query.shape[-1], value.shape[-1]
    queries, keys = (
        [end - start for start, end in pairwise([0, *(given.get(name) or [tensor.shape[0]])])]
        for name, tensor in (("actual_seq_qlen", query), ("actual_seq_kvlen", value))
    )
    pairs: float = sum(map(math.prod, zip(queries, keys, strict=True)))
    if given.get("sparse_mode", 0) in (2, 3, 7, 8):
        pairs /= 2
    products = 2 * size + 2 * value_size
    if "grad" in func._schema.name:
        products = 3 * 2 * size + 2 * 2 * value_size
    return float(heads * pairs * products)


def _varlen_attention(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> float:
    """As on an NPU; the lengths are those of the host tensors from which the bounds of the segments were copied."""
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    _, heads, size = given["query"].shape
    queries, keys = (getattr(given[name], HOST_COPY).diff() for name in ("cu_seq_q", "cu_seq_k"))
    pairs = float((queries.double() * keys).sum()) / (2 if given["is_causal"] else 1)
    products = 5 if "backward" in func._schema.name else 2
    return 2.0 * products * heads * size * pairs


def is_on_device(func: Any, dispatch_key: str) -> bool:
    """Whether torch, or torch_npu, computes this operator on its device, without a copy of its tensors to the host.

    A composite operator calls others, which are judged themselves; one that is composite only in form (NonFunctional)
    calls its own form with `out`.

    Args:
        dispatch_key: Key of PyTorch's dispatcher: "PrivateUse1" for an NPU, "CUDA" for a GPU.
    """
    name = func._schema.name

    def has(overload: str, key: str) -> bool:
        full = f"{name}.{overload}" if overload not in ("", "default") else name
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(full, key))

    overload = func._overloadname
    keys = (dispatch_key, "CompositeExplicitAutograd", "CompositeImplicitAutograd")
    if any(has(overload, key) for key in keys):
        return True
    if not has(overload, "CompositeExplicitAutogradNonFunctional"):
        return False
    plain = name.removesuffix("_")  # also the form that changes its argument calls the form with `out`
    packet = getattr(getattr(torch.ops, func.namespace), plain.split("::")[1])
    return any(
        torch._C._dispatch_has_kernel_for_dispatch_key(f"{plain}.{other}", dispatch_key)
        for other in packet.overloads()
        if "out" in other
    )
