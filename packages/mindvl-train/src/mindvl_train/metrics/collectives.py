# SPDX-License-Identifier: Apache-2.0
"""Notices every collective, and every wait for one, of a step that is measured.

torch has no hook for this that works with every backend, so for the length of that step the methods of its process
groups and of their handles are wrapped. Used by step_clock.py.
"""

import threading
from collections.abc import Callable
from typing import Any, Literal

from torch.distributed import ProcessGroup, Work

Kind = Literal["pipeline", "communication"]

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


def notice_collectives(enter: Callable[[Kind], None], leave: Callable[[], None]) -> Callable[[], None]:
    """Tell of the collectives of the calling thread and of its backward passes.

    Args:
        enter: Called before a collective is begun, and before it is waited for.
        leave: Called after either.

    Returns:
        What ends it and leaves torch as it was.
    """
    owner = threading.current_thread()
    last = ""  # name of the call before this one
    kinds: dict[int, Kind] = {}  # of handles, by id; an id that is used again is written again

    def is_ours() -> bool:
        # Backward of an accelerator runs in threads that Python did not start; a save in the background is no step.
        thread = threading.current_thread()
        return thread is owner or isinstance(thread, threading._DummyThread)

    def watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal last
            if not is_ours():
                return original(group, *args, **kwargs)
            # A batch of sends and receives has one handle, which the end of the batch gives.
            of_stages = name in _POINT_TO_POINT or (name == "_end_coalescing" and last in _POINT_TO_POINT)
            kind: Kind = "pipeline" if of_stages else "communication"
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
            if not is_ours():
                return original(handle, *args, **kwargs)
            enter(kinds.get(id(handle), "communication"))
            try:
                return original(handle, *args, **kwargs)
            finally:
                leave()

        return wait

    # From vars, because what getattr gives is bound to nothing and would not bind again when it is put back.
    before: list[tuple[Any, str, Any]] = [(Work, "wait", vars(Work)["wait"])]
    before += [(ProcessGroup, name, vars(ProcessGroup)[name]) for name in _CALLS if name in vars(ProcessGroup)]
    for kind, name, _ in before:
        original = getattr(kind, name)
        setattr(kind, name, watched_wait(original) if kind is Work else watched(name, original))

    def restore() -> None:
        for kind, name, original in before:
            setattr(kind, name, original)

    return restore
