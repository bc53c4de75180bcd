# SPDX-License-Identifier: Apache-2.0
"""Count what makes the host wait for the device: reading values, or shapes that depend on values.

The simulator's tensors live on the CPU, where such reads cost nothing and go unseen. PyTorch's own dispatch shows most
of them (`item`, `bool(x)`, `nonzero`, a mask as index); `tolist`, `cpu` and `numpy` of a CPU tensor never reach the
dispatcher, so these three methods are replaced while a simulation runs.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .state import Simulation

_METHODS = ("tolist", "cpu", "numpy")
_READS = {
    "aten::_local_scalar_dense": "item",
    "aten::nonzero": "nonzero",
    "aten::masked_select": "masked_select",
    "aten::equal": "equal",
    "aten::_unique2": "unique",
    "aten::unique_dim": "unique",
    "aten::unique_consecutive": "unique",
    "aten::bincount": "bincount",
}


class _Watch(TorchDispatchMode):
    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self.simulation = simulation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if not self.simulation.inside:
            if name in _READS:
                self.simulation.syncs.append(_READS[name])
            elif name.startswith("aten::index") and _has_mask(args):
                self.simulation.syncs.append("index by mask")
            elif name == "aten::repeat_interleave" and (kwargs or {}).get("output_size") is None:
                self.simulation.syncs.append("repeat_interleave")
        return func(*args, **(kwargs or {}))


@contextmanager
def count_syncs(simulation: Simulation) -> Iterator[None]:
    """Enter every host sync of the block in `simulation.syncs`."""
    with ExitStack() as stack:
        for name in _METHODS:
            stack.enter_context(mock.patch.object(Tensor, name, _counted(name, simulation)))
        stack.enter_context(mock.patch.object(torch, "tensor", _counted_factory(simulation)))
        stack.enter_context(_Watch(simulation))
        yield


def _counted(name: str, simulation: Simulation) -> Callable[..., Any]:
    original = getattr(Tensor, name)

    def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not simulation.inside:
            simulation.syncs.append(name)
        return original(self, *args, **kwargs)

    return method


def _counted_factory(simulation: Simulation) -> Callable[..., Tensor]:
    original = torch.tensor

    def tensor(data: Any, *args: Any, **kwargs: Any) -> Tensor:
        if not simulation.inside and not isinstance(data, Tensor):
            simulation.syncs.extend("torch.tensor of tensors" for leaf in tree_leaves(data) if isinstance(leaf, Tensor))
        return original(data, *args, **kwargs)

    return tensor


def _has_mask(args: tuple[Any, ...]) -> bool:
    """Whether an index tensor is bool: its number of rows is known only to the device."""
    indices = next((value for value in args[1:2] if isinstance(value, (list, tuple))), ())
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices)
