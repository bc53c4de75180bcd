# SPDX-License-Identifier: Apache-2.0
"""Detects every collective, and every wait for one, during a timed step.

torch has no hook for this that works with every backend, so the methods of process groups and of their handles are
wrapped during that step. Used by step_clock.py.
"""

import threading
from collections.abc import Callable
from typing import Any, Literal

from torch.distributed import ProcessGroup, Work

Kind = Literal["pipeline", "communication"]

# Methods that exist in the installed torch are wrapped; sends and receives are pipeline communication.
_POINT_TO_POINT = frozenset({"send", "recv", "recv_anysource"})
COLLECTIVES = (
    "_allgather_base",
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
_CALLS = (*COLLECTIVES, *sorted(_POINT_TO_POINT), "_end_coalescing")


def watch_collectives(enter: Callable[[Kind], None], leave: Callable[[], None]) -> Callable[[], None]:
    """Watch the collectives of the calling thread and of its backward passes.

    Args:
        enter: Called before a collective is started, and before a wait for it.
        leave: Called after either.

    Returns:
        A function that restores the methods of torch.
    """
    owner = threading.current_thread()
    last = ""  # name of the previous call
    kinds: dict[int, Kind] = {}  # kind by id of the handle; overwritten when an id is reused

    def is_watched_thread() -> bool:
        # Backward passes run in threads that Python did not start; the thread of an asynchronous save is not watched.
        thread = threading.current_thread()
        return thread is owner or isinstance(thread, threading._DummyThread)

    def watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal last
            if not is_watched_thread():
                return original(group, *args, **kwargs)
            # A batch of sends and receives has one handle, returned at the end of the batch.
            is_pipeline = name in _POINT_TO_POINT or (name == "_end_coalescing" and last in _POINT_TO_POINT)
            kind: Kind = "pipeline" if is_pipeline else "communication"
            last = name
            enter(kind)
            try:
                handle = original(group, *args, **kwargs)
            finally:
                leave()
            kinds[id(handle)] = kind
            return handle

        return call

    def watched_wait(original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(handle: Any, *args: Any, **kwargs: Any) -> Any:
            if not is_watched_thread():
                return original(handle, *args, **kwargs)
            enter(kinds.get(id(handle), "communication"))
            try:
                return original(handle, *args, **kwargs)
            finally:
                leave()

        return wait

    # From vars, because an attribute from getattr would not be bound to instances after it is restored.
    before: list[tuple[Any, str, Any]] = [(Work, "wait", vars(Work)["wait"])]
    before += [(ProcessGroup, name, vars(ProcessGroup)[name]) for name in _CALLS if name in vars(ProcessGroup)]
    for kind, name, _ in before:
        original = getattr(kind, name)
        setattr(kind, name, watched_wait(original) if kind is Work else watched(name, original))

    def restore() -> None:
        for kind, name, original in before:
            setattr(kind, name, original)

    return restore
