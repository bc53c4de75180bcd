# SPDX-License-Identifier: Apache-2.0
"""What was called: operator, shapes, types and strides of its tensors, plain values; enough to replay on the wheel."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class TensorSpec:
    """All of a tensor except its values."""

    shape: tuple[int, ...]
    dtype: str  # "bfloat16"
    stride: tuple[int, ...]
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorSpec":
        """The description of `tensor`."""
        name = str(tensor.dtype).removeprefix("torch.")
        return cls(tuple(tensor.shape), name, tensor.stride(), tensor.requires_grad)

    def empty(self, device: torch.device | str) -> Tensor:
        """A tensor like the described one, with arbitrary values."""
        dtype = getattr(torch, self.dtype)
        return torch.empty_strided(self.shape, self.stride, dtype=dtype, device=device).requires_grad_(
            self.requires_grad
        )


@dataclass(frozen=True)
class Call:
    """One call: name of the overload, every argument by name, what came back."""

    op: str
    arguments: dict[str, Any]
    outputs: list[Any] | None = None  # None: the call was refused

    @classmethod
    def of(cls, op: str, arguments: Mapping[str, Any], outputs: Any = None) -> "Call":
        """The record of a call with these arguments."""
        outputs = [outputs] if isinstance(outputs, Tensor) else outputs
        return cls(op, {name: _described(value) for name, value in arguments.items()}, _described(outputs))

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` is the way back."""
        arguments = {name: _plain(value) for name, value in self.arguments.items()}
        return {"op": self.op, "arguments": arguments, "outputs": _plain(self.outputs)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "Call":
        """The call that `to_json` wrote."""
        arguments = {name: _restored(value) for name, value in document["arguments"].items()}
        return cls(document["op"], arguments, _restored(document["outputs"]))

    def empty_arguments(self, device: torch.device | str) -> dict[str, Any]:
        """The arguments with tensors of arbitrary values."""
        return {name: _filled(value, device) for name, value in self.arguments.items()}


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return TensorSpec.of(value)
    if isinstance(value, (list, tuple)):
        return [_described(item) for item in value]
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, TensorSpec):
        return {"tensor": asdict(value)}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _restored(value: Any) -> Any:
    if isinstance(value, dict):
        spec = value["tensor"]
        return TensorSpec(tuple(spec["shape"]), spec["dtype"], tuple(spec["stride"]), spec["requires_grad"])
    return [_restored(item) for item in value] if isinstance(value, list) else value


def _filled(value: Any, device: torch.device | str) -> Any:
    if isinstance(value, TensorSpec):
        return value.empty(device)
    return [_filled(item, device) for item in value] if isinstance(value, list) else value
