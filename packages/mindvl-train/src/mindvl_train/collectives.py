# SPDX-License-Identifier: Apache-2.0
"""Notices every collective and every wait for one: the last one for a watchdog, the time for the step clock.

torch has no hook for this that works with every backend, so that while a run trains, the methods of its process groups
and of their handles are wrapped here; they are put back at the end.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.distributed import ProcessGroup, Work

from mindvl_train.step_clock import Phase, enter_phase, is_measuring, leave_phase

# As far as this version of torch has them; sends and receives are what pipeline stages wait for.
_POINT_TO_POINT = frozenset({"send", "recv", "recv_anysource"})
_CALLS = (
    *sorted(_POINT_TO_POINT),
    "_allgather_base",
    "_end_coalescing",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
)


@dataclass(frozen=True)
class Collective:
    """A collective this process called."""

    name: str
    group: str  # as its maker described it
    started: float  # time.monotonic()


_last: tuple[str, Any, float] | None = None
_kinds: dict[int, Phase] = {}  # of handles, by id; an id that is used again is written again


def last_collective() -> Collective | None:
    """What was called last, whether it has ended or not; None before the first. Callable from any thread."""
    last = _last
    if last is None:
        return None
    name, group, started = last
    return Collective(name.strip("_"), str(group.group_desc or group.group_name), started)


@contextmanager
def watched_collectives() -> Iterator[None]:
    """Notice the collectives of the calling thread and of its backward passes inside the block."""
    global _last
    owner = threading.current_thread()

    def is_ours() -> bool:
        # Backward of an accelerator runs in threads that Python did not start; a background save is not the step.
        thread = threading.current_thread()
        return thread is owner or isinstance(thread, threading._DummyThread)

    # From vars, because what getattr gives is bound to nothing and would not bind again when it is put back.
    before: list[tuple[type, str, Any]] = [(Work, "wait", vars(Work)["wait"])]
    before += [(ProcessGroup, name, vars(ProcessGroup)[name]) for name in _CALLS if name in vars(ProcessGroup)]
    for kind, name, _ in before:
        original = getattr(kind, name)
        setattr(kind, name, _wait(original, is_ours) if name == "wait" else _call(name, original, is_ours))
    try:
        yield
    finally:
        for kind, name, original in before:
            setattr(kind, name, original)
        _last = None
        _kinds.clear()


def _call(name: str, original: Callable[..., Any], is_ours: Callable[[], bool]) -> Callable[..., Any]:
    own_kind: Phase = "pipeline" if name in _POINT_TO_POINT else "communication"

    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        global _last
        if not is_ours():
            return original(group, *args, **kwargs)
        kind = own_kind
        if name == "_end_coalescing" and _last is not None and _last[0] in _POINT_TO_POINT:
            kind = "pipeline"  # a batch of sends and receives has one handle
        _last = (name, group, time.monotonic())
        enter_phase(kind)
        try:
            handle = original(group, *args, **kwargs)
        finally:
            leave_phase()
        if is_measuring() and handle is not None:
            _kinds[id(handle)] = kind
        return handle

    return call


def _wait(original: Callable[..., Any], is_ours: Callable[[], bool]) -> Callable[..., Any]:
    def wait(handle: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_ours():
            return original(handle, *args, **kwargs)
        enter_phase(_kinds.pop(id(handle), "communication"))
        try:
            return original(handle, *args, **kwargs)
        finally:
            leave_phase()

    return wait
