# SPDX-License-Identifier: Apache-2.0
"""Count the operators that a piece of code calls: launches, bytes read and written, FLOPs. No device is needed.

Runs beside the code under measurement, forward and backward, on fake or on real tensors. A call reads each of its tensor
arguments once and writes each result once; that is the traffic between a device and its memory if caches hold nothing from one
operator to the next. Views and allocations are no launches.
"""

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

Kind = Literal["matmul", "attention", "other"]

_MATMULS = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm"}
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_OVERWRITES = {"copy_", "fill_", "zero_"}  # in place, but the old values are not read


@dataclass(kw_only=True)
class OperatorTraffic:
    """All calls of one operator."""

    operator: str  # "aten.mm.default"
    kind: Kind
    launches: int = 0
    bytes: int = 0  # read and written
    flops: int = 0  # of matmuls and attention; 0 for others


class TrafficCounter(TorchDispatchMode):
    """Context manager that counts every operator called inside it.

    The backward pass is counted if it runs inside too. An operator implemented by one kernel counts once, whatever the
    kernel does; an operator that PyTorch composes of others counts as these.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators: dict[str, OperatorTraffic] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        count = _bytes(func, args, kwargs, results)
        if count is not None:
            row = self.operators.setdefault(str(func), OperatorTraffic(operator=str(func), kind=_kind(func)))
            row.launches += 1
            row.bytes += count
            formula = flop_registry.get(func._overloadpacket)
            row.flops += formula(*args, **kwargs, out_val=results) if formula is not None else 0
        return results

    def total(self, *kinds: Kind) -> OperatorTraffic:
        """The sum over operators of the given kinds; of all without one."""
        rows = [row for row in self.operators.values() if not kinds or row.kind in kinds]
        return OperatorTraffic(
            operator="total",
            kind=kinds[0] if len(kinds) == 1 else "other",
            launches=sum(row.launches for row in rows),
            bytes=sum(row.bytes for row in rows),
            flops=sum(row.flops for row in rows),
        )


def _kind(func: Any) -> Kind:
    name = func._overloadpacket.__name__
    if name in _MATMULS:
        return "matmul"
    return "attention" if "attention" in name or "attn" in name else "other"


def _bytes(func: Any, args: Any, kwargs: Any, results: Any) -> int | None:
    """Bytes that a call reads and writes; None if it launches nothing."""
    given: dict[str, Any] = (
        dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    )
    written, overwritten = [], []
    for argument in func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name in given:
            written += _tensors([given[argument.name]])
            if argument.kwarg_only or func._overloadpacket.__name__ in _OVERWRITES:  # out=, or a plain assignment
                overwritten += _tensors([given[argument.name]])
    inputs = _tensors(list(given.values()))
    known = {x.untyped_storage()._cdata for x in inputs}
    written += [x for x in _tensors(results) if x.untyped_storage()._cdata not in known]
    if not written or func._overloadpacket.__name__ in _ALLOCATIONS:
        return None
    ignored = {id(x) for x in overwritten}
    return sum(map(_size, written)) + sum(_size(x) for x in inputs if id(x) not in ignored)


def _tensors(values: Any) -> list[Tensor]:
    """The distinct tensors in a nest of values."""
    return list({id(x): x for x in tree_leaves(values) if isinstance(x, Tensor)}.values())


def _size(x: Tensor) -> int:
    """Bytes of the distinct elements: an expanded axis is read once."""
    count = 1
    for length, stride in zip(x.shape, x.stride(), strict=True):
        count *= length if stride else 1
    return count * x.element_size() if x.numel() else 0
