# SPDX-License-Identifier: Apache-2.0
"""Live device memory by category, from the storages of tensors.

Fed by fake_device.py with every tensor that an operator returns. A storage is counted from the operator that makes it
to the moment when nothing refers to it any more.
"""

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from mindvl_train.rehearsal.record import MemoryPoint, Peak

_BLOCK = 512  # device allocators give multiples of 512 bytes
_MAX_POINTS = 8192

# Category of a storage that is made in a backward pass: gradients of activations and recomputed activations.
TEMPORARY = "temporary"


class MemoryLog:
    """Bytes of live storages: now, at the peak, and over time.

    Args:
        is_device: Whether sizes are rounded up as a device allocator does; not on a CPU.
    """

    def __init__(self, *, is_device: bool) -> None:
        self._block = _BLOCK if is_device else 1
        self._live: dict[
            int, tuple[Any, int, str]
        ] = {}  # by address of the StorageImpl: weak reference, bytes, category
        self.now = self.peak_bytes = 0
        self._phase_peak = 0
        self.held: Counter[str] = Counter()
        self._peak: tuple[int, str, int, str, dict[str, int]] = (0, "", 0, "", {})
        self._points: list[tuple[int, int, int, dict[str, int]]] = []  # operator, bytes, phase, bytes by category
        self._every = 1  # operators per point
        self._high: tuple[int, int, int, dict[str, int]] = (0, 0, 0, {})  # the highest point of the interval

    def add(self, tensor: Tensor, category: str, operator: int, phase: int, name: str) -> bool:
        """Count the storage of a tensor if it is new; whether there is a new peak, for which the caller adds a source."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return False
        size = -(-storage.nbytes() // self._block) * self._block
        self._live[key] = (weakref.ref(storage, lambda _: self._remove(key)), size, category)
        self.now += size
        self.held[category] += size
        self._note(operator, phase)
        if self.now > self._phase_peak:
            self._phase_peak = self.now
        if self.now <= self.peak_bytes:
            return False
        self.peak_bytes = self.now
        self._peak = (operator, name, phase, "", dict(self.held))
        return True

    def set_source(self, source: str) -> None:
        """Name the line of the newest peak."""
        operator, name, phase, _, held = self._peak
        self._peak = (operator, name, phase, source, held)

    def assign(self, tensors: Iterable[Any], category: str) -> None:
        """Move the storages of tensors to a category, such as parameters."""
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                continue
            key = tensor.untyped_storage()._cdata
            if key in self._live:
                reference, size, before = self._live[key]
                self.held[before] -= size
                self.held[category] += size
                self._live[key] = (reference, size, category)

    def restart(self) -> None:
        """Forget the peak: that of the following operators is wanted."""
        self.peak_bytes = 0

    def take_phase_peak(self) -> int:
        """Most live bytes since the last call."""
        peak, self._phase_peak = max(self._phase_peak, self.now), self.now
        return peak

    def categories(self) -> dict[str, int]:
        """Live bytes by category now."""
        return {name: size for name, size in sorted(self.held.items()) if size}

    def peak(self) -> Peak:
        """The moment of most memory since the last restart."""
        operator, name, phase, source, held = self._peak
        return Peak(
            num_bytes=self.peak_bytes,
            operator=operator,
            operator_name=name,
            phase=phase,
            source=source,
            categories={name: size for name, size in sorted(held.items()) if size},
        )

    def timeline(self) -> tuple[tuple[str, ...], tuple[MemoryPoint, ...]]:
        """(categories, the highest point of each interval of operators)."""
        names = tuple(sorted(self.held))
        return names, tuple(
            MemoryPoint(operator=operator, num_bytes=size, phase=phase, held=tuple(held.get(name, 0) for name in names))
            for operator, size, phase, held in [*self._points, self._high]
        )

    def _note(self, operator: int, phase: int) -> None:
        if operator // self._every != self._high[0] // self._every:
            self._points.append(self._high)
            self._high = (operator, self.now, phase, dict(self.held))
            if len(self._points) > _MAX_POINTS:
                self._every *= 2
                pairs = zip(self._points[::2], self._points[1::2], strict=False)
                self._points = [max(pair, key=lambda point: point[1]) for pair in pairs]
        elif self.now >= self._high[1]:
            self._high = (operator, self.now, phase, dict(self.held))

    def _remove(self, key: int) -> None:
        _, size, category = self._live.pop(key)
        self.now -= size
        self.held[category] -= size


class ModuleStack:
    """The part of the model that runs now, for the category of the activations that it makes."""

    def __init__(self) -> None:
        self._names: list[str] = []

    @property
    def category(self) -> str:
        """Category of a storage that is made now."""
        if torch._C._current_graph_task_id() != -1:
            return TEMPORARY
        return f"activations/{self._names[-1]}" if self._names else "other"

    def watch(self, name: str, module: torch.nn.Module) -> None:
        """Give a module and all that it calls this name."""
        module.register_forward_pre_hook(lambda *_: self._names.append(name))
        module.register_forward_hook(lambda *_: self._leave(name), always_call=True)

    def _leave(self, name: str) -> None:
        assert self._names.pop() == name
