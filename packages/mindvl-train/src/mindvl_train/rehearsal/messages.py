# SPDX-License-Identifier: Apache-2.0
"""The messages of a rehearsed rank: none is sent; order, group, size and waits of each are kept.

Collectives of torch.distributed reach fake_device.py as operators, which asks this log for their results.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork, ProcessGroup
from torch.utils._pytree import tree_leaves

from mindvl_train.rehearsal.record import Group, Message, MessageKind
from mindvl_train.rehearsal.sources import calling_line

# Name of the operator -> kind, and the argument with the tensors that this rank gives.
_KINDS: dict[str, tuple[MessageKind, int]] = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "allgather_": ("all_gather", 1),
    "_allgather_base_": ("all_gather", 1),
    "allgather_coalesced_": ("all_gather", 1),
    "allgather_into_tensor_coalesced_": ("all_gather", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "gather_": ("gather", 1),
    "scatter_": ("scatter", 1),
    "barrier": ("barrier", 0),
    "monitored_barrier_": ("barrier", 0),
    "send": ("send", 0),
    "recv_": ("recv", 0),
    "recv_any_source_": ("recv", 0),
}


@dataclass
class Moment:
    """Where the rank is; set by the engine."""

    step: int = -1
    phase: str = "start"
    microbatch: int | None = None
    operator: int = 0


class MessageLog:
    """Messages in the order in which the host issues them.

    Args:
        at: The current moment of the rehearsal.
    """

    def __init__(self, at: Moment) -> None:
        self.at = at
        self.messages: list[Message] = []
        self.groups: dict[str, Group] = {}  # by the name that torch gives them
        # Handle and messages by id of the handle, which is kept, so that ids stay unique.
        self._works: dict[int, tuple[object, Sequence[int]]] = {}
        self._batch: int | None = None
        self._batches = count()

    def answer(self, func: Any, args: Sequence[Any]) -> Any:
        """Keep a collective; its results: its own first argument, and a handle that is complete."""
        name = func._schema.name.split("::")[1]
        work = FakeWork()
        if name in _KINDS:
            self._works[id(work)] = (work, (len(self.messages),))
            self._keep(func, name, args)
        results = tuple(work.boxed() if "Work" in str(r.type) else args[0] for r in func._schema.returns)
        return results[0] if len(results) == 1 else results or None

    def keep_objects(
        self, group: ProcessGroup | None, kind: MessageKind = "all_gather_object", peer: int | None = None
    ) -> None:
        """Keep an exchange of Python objects."""
        group = group or dist.group.WORLD
        assert group is not None
        source, caller = calling_line(3)
        self._append(
            kind=kind, group=group.group_name, peer=peer, dtype="object", shapes=(), num_elements=0, num_bytes=0,
            is_async=False, on_host=True, source=source, caller=caller,
        )  # fmt: skip

    def batch(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """batch_isend_irecv whose members share an id."""

        def batch_isend_irecv(operations: Any) -> Any:
            self._batch, first = next(self._batches), len(self.messages)
            try:
                works = original(operations)
            finally:
                self._batch = None
            for work in works:
                if id(work) not in self._works:  # torch_npu gives one handle for all members
                    self._works[id(work)] = (work, range(first, len(self.messages)))
            return works

        return batch_isend_irecv

    def wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Work.wait that notes the message it waits for."""

        def wait(handle: Any, *args: Any, **kwargs: Any) -> Any:
            _, indices = self._works.get(id(handle), (None, ()))
            for index in indices:
                if self.messages[index].waited_at is None:
                    self.messages[index] = replace(self.messages[index], waited_at=len(self.messages))
            return original(handle, *args, **kwargs)

        return wait

    def used_groups(self) -> dict[str, Group]:
        """The groups of the messages."""
        used = {message.group for message in self.messages}
        return {name: group for name, group in self.groups.items() if name in used}

    def _keep(self, func: Any, name: str, args: Sequence[Any]) -> None:
        kind, place = _KINDS[name]
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False))
        tensors = [leaf for leaf in tree_leaves(args[place]) if isinstance(leaf, Tensor)]
        group = _unboxed(given["process_group"]).group_name
        ranks = self.groups[group].ranks
        peer = next((given[key] for key in ("dst", "src", "root_rank") if key in given), None)
        splits = (tuple(given.get("input_split_sizes", ())), tuple(given.get("output_split_sizes", ())))
        source, caller = calling_line(4)
        is_barrier = kind == "barrier"
        self._append(
            kind=kind,
            group=group,
            peer=None if peer is None else ranks[peer],
            batch=self._batch,
            tag=given.get("tag", 0),
            dtype=str(tensors[0].dtype).removeprefix("torch."),
            shapes=() if is_barrier else tuple(tuple(tensor.shape) for tensor in tensors),
            num_elements=0 if is_barrier else sum(tensor.numel() for tensor in tensors),
            num_bytes=0 if is_barrier else sum(tensor.numel() * tensor.itemsize for tensor in tensors),
            splits=splits if any(splits) else (),
            is_async=bool(given.get("async_op", kind in ("send", "recv"))),
            on_host=self.groups[group].backend == "gloo" and type(tensors[0]) is Tensor,
            source=source,
            caller=caller,
        )

    def _append(self, **fields: Any) -> None:
        at = self.at
        self.messages.append(
            Message(
                index=len(self.messages),
                step=at.step,
                phase=at.phase,
                microbatch=at.microbatch,
                operator=at.operator,
                **fields,
            )
        )


def _unboxed(group: Any) -> ProcessGroup:
    with suppress(TypeError, RuntimeError):
        return ProcessGroup.unbox(group)
    return cast(ProcessGroup, group)


def fake_groups(log: MessageLog, original: Callable[..., Any], world_size: int) -> Callable[..., Any]:
    """torch's function that makes one process group, with the fake backend; each group is kept."""

    def new_group(size: int, rank: int, ranks: Any, backend: Any, store: Any, *rest: Any, **options: Any) -> Any:
        options["backend_options"] = None
        made = original(size, rank, ranks, "fake", store, *rest, **options)
        if made[0] not in (None, dist.distributed_c10d.GroupMember.NON_GROUP_MEMBER):
            description = options.get("group_desc") or "default_pg"
            members = tuple(ranks) or tuple(range(world_size))
            # A group without a backend of its own inherits that of the first, which torch knows as fake.
            real = next(iter(log.groups.values())).backend if str(backend) == "fake" else str(backend)
            log.groups[made[0].group_name] = Group(name=str(description), ranks=members, backend=real)
        return made

    return new_group
