# SPDX-License-Identifier: Apache-2.0
"""Records the memory of training steps, on a device and on a CPU; used by measure.py."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self
from unittest import mock

import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch._C._profiler import _EventType
from torch.distributed import ProcessGroup

from mindvl_train.metrics.collectives import COLLECTIVES

_LONGEST_RELEASE = 1.0  # seconds that a thread of gloo may take to release the tensors of a finished collective


class DeviceRecorder:
    """Reads the counters of the device allocator."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)
        self._between = self._peak = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def begin_step(self) -> None:
        self._module.synchronize()
        self._between = float(self._module.memory_allocated())
        self._module.reset_peak_memory_stats()

    def end_step(self) -> None:
        self._module.synchronize()
        self._peak = float(self._module.max_memory_allocated())

    def result(self) -> tuple[float, float]:
        """(bytes between steps, at the fullest moment of the last step)."""
        return self._between, self._peak


class CpuRecorder:
    """Records every allocation with the profiler."""

    def __init__(self) -> None:
        self._profiler = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
        )
        self._step: Any = None

    def __enter__(self) -> Self:
        self._profiler.__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        self._profiler.__exit__(*details)

    def begin_step(self) -> None:
        self._step = torch.profiler.record_function("measured step")
        self._step.__enter__()

    def end_step(self) -> None:
        self._step.__exit__(None, None, None)

    def result(self) -> tuple[float, float]:
        """(bytes between steps, at the fullest moment of the last step)."""
        profiler: Any = self._profiler.profiler
        events = list(_outside_collectives(profiler.kineto_results.experimental_event_tree()))
        last = max((event for event in events if event.name == "measured step"), key=lambda step: step.start_time_ns)
        changes = sorted(
            (event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size)
            for event in events
            if event.tag == _EventType.Allocation
        )
        return most_bytes(changes, last.start_time_ns, last.end_time_ns)


def _outside_collectives(events: Iterable[Any]) -> Iterator[Any]:
    """Profiler events and those inside them, without what runs inside a collective.

    gloo copies the tensors of some collectives. NCCL and HCCL read and write the given tensors, and a rehearsal counts
    those only.
    """
    waiting = list(events)
    while waiting:
        event = waiting.pop()
        if event.tag != _EventType.TorchOp or not event.name.startswith("c10d::"):
            yield event
            waiting += event.children


def most_bytes(changes: Iterable[tuple[int, int, int]], begin: int, end: int) -> tuple[float, float]:
    """(live bytes before `begin`, most live bytes from `begin` to `end`).

    The profiler records the threads that it was started in. A block that another thread releases has no release event,
    and is counted until its address is given out again.

    Args:
        changes: (time, address, allocated bytes; negative for a release), by time.
        begin: Start of the interval.
        end: End of the interval.
    """
    live: dict[int, int] = {}
    held = between = peak = 0
    for moment, address, change in changes:
        held -= live.pop(address, 0)
        if change > 0:
            live[address] = change
            held += change
        if moment < begin:
            between = held
        elif moment <= end:
            peak = max(peak, held)
    return float(between), float(peak)


@contextmanager
def wait_for_collectives() -> Iterator[None]:
    """Complete every collective when it is started, and wait until gloo has released its tensors.

    A thread of gloo releases them shortly after the collective is finished, so that they would otherwise live longer than
    on a device in some steps, and the profiler would miss their release.
    """

    def completed(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            tensors = list(_tensors((args, tuple(kwargs.values()))))
            before = [_references(tensor) for tensor in tensors]
            original(group, *args, **kwargs).wait()
            deadline = time.monotonic() + _LONGEST_RELEASE
            while time.monotonic() < deadline:
                if all(_references(tensor) <= count for tensor, count in zip(tensors, before, strict=True)):
                    break
                time.sleep(0)
            return FakeWork()

        return call

    methods: dict[str, Any] = {
        name: completed(getattr(ProcessGroup, name)) for name in COLLECTIVES if name in vars(ProcessGroup)
    }
    with mock.patch.multiple(ProcessGroup, **methods):
        yield


def _tensors(value: Any) -> Iterator[Tensor]:
    """Tensors of nested lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def _references(tensor: Tensor) -> int:
    """References to a tensor and to its storage, in all threads."""
    return tensor._use_count() + torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined]
