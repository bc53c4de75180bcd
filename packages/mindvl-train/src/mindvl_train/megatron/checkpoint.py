# SPDX-License-Identifier: Apache-2.0
"""What this process holds of model and optimizer, cut into boxes of the whole tensors.

Comes after model and optimizer are built, before tensor_files.py, which writes and reads the boxes. Names and places
are megatron-core's (`sharded_state_dict`), so they are the same in every layout. The distributed optimizer keeps its
state in flat slices, one for each rank that has the same weights; a flat slice of a matrix is at most three boxes.
So every rank writes what it owns and nobody gathers anything: megatron-core's own resharding format collects the state
of all those ranks in each of them.
"""

import math
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from torch import Tensor

STATE = "optimizer.state"  # optimizer.state.exp_avg.KEY belongs to the weights KEY
MASTER = f"{STATE}.param."

# What reading damaged tensors raises, by the layer that notices.
DAMAGE = (FileNotFoundError, EOFError, RuntimeError, ValueError, KeyError, pickle.UnpicklingError)


@dataclass(frozen=True)
class Piece:
    """A box of a whole tensor that this process holds."""

    key: str
    whole: tuple[int, ...]  # shape of the tensor in the checkpoint
    offset: tuple[int, ...]  # of the box in it
    content: Tensor  # the box, with as many axes; shares memory with model or optimizer


@dataclass(frozen=True)
class _Part:
    """What a stretch of a parameter, read as a flat array, is in the checkpoint."""

    key: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int  # in the flat parameter


@dataclass(frozen=True)
class _Entry:
    """One parameter or buffer of the model."""

    tensor: Tensor
    parts: tuple[_Part, ...]  # two for a gated matrix: its halves lie apart in the whole
    is_main: bool  # of the tensor- and pipeline-parallel ranks that hold it, the one that saves it
    dp_rank: int  # among the ranks with the same weights


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The MindVLModel inside gradient buffers and precision wrappers."""
    while isinstance(inner := getattr(model, "module", None), torch.nn.Module):
        model = inner
    return model


def owned_pieces(models: Sequence[torch.nn.Module], optimizer: Any) -> list[Piece]:
    """What this process saves: no two processes own the same element, together they own all.

    Weights that are trained are owned as their optimizer state is. Only there are they surely those of the last update:
    with overlap, the other ranks get them in the next forward. Frozen ones are dealt out.
    """
    owners = _owners(optimizer)
    pieces: list[Piece] = []
    for number, entry in enumerate(_entries(models)):
        if not entry.is_main:
            continue
        if entry.tensor in owners:
            owner = owners[entry.tensor]
            if owner is not None:
                owner.allocate()  # a run may be asked to stop when all its steps so far were left out
                weights = entry.tensor.detach().view(-1)[owner.start : owner.end]
                pieces += _cut(entry, "", weights, owner.start)
                for name, state in owner.states().items():
                    pieces += _cut(entry, f"{STATE}.{name}.", state, owner.start)
        elif number % _num_copies(entry.tensor) == entry.dp_rank:
            pieces += _cut(entry, "", entry.tensor.detach().view(-1), 0)
    return pieces


def wanted_pieces(models: Sequence[torch.nn.Module], optimizer: Any | None) -> list[Piece]:
    """What this process loads: all its weights, and its slices of the optimizer's state."""
    owners = _owners(optimizer)
    pieces: list[Piece] = []
    for entry in _entries(models):
        pieces += _cut(entry, "", entry.tensor.detach().view(-1), 0)
        owner = owners.get(entry.tensor)
        if owner is not None:
            owner.allocate()
            for name, state in owner.states().items():
                pieces += _cut(entry, f"{STATE}.{name}.", state, owner.start)
    return pieces


def optimizer_steps(optimizer: Any) -> int:
    """Updates the optimizer has made, which its bias correction counts; 0 where nothing is trained."""
    return max((int(group.get("step", 0)) for part in _parts(optimizer) for group in part.param_groups), default=0)


def set_optimizer_steps(optimizer: Any, steps: int) -> None:
    """The counterpart, after the state is loaded."""
    for part in _parts(optimizer):
        for group in part.optimizer.param_groups:
            group["step"] = steps


def boxes(shape: tuple[int, ...], start: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The elements from start to end of a pack-major array as boxes (offset, size), in order."""
    if start >= end:
        return
    if len(shape) < 2:
        yield ((), ()) if not shape else ((start,), (end - start,))
        return
    pack = math.prod(shape[1:])
    (first, in_first), (last, in_last) = divmod(start, pack), divmod(end, pack)
    if first == last:
        yield from (((first, *offset), (1, *size)) for offset, size in boxes(shape[1:], in_first, in_last))
        return
    if in_first:
        yield from (((first, *offset), (1, *size)) for offset, size in boxes(shape[1:], in_first, pack))
        first += 1
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from (((last, *offset), (1, *size)) for offset, size in boxes(shape[1:], 0, in_last))


@dataclass(frozen=True)
class _Owner:
    """This rank's slice of a trained parameter, in the optimizer that updates it."""

    optimizer: Any
    param: Tensor
    start: int
    end: int

    def states(self) -> dict[str, Tensor]:
        """Flat tensors by name; master weights only where they are not the weights themselves."""
        held = self.optimizer._get_main_param_and_optimizer_states(self.param)
        states = {name: state for name, state in held.items() if name != "step"}
        if states["param"].untyped_storage().data_ptr() == self.param.untyped_storage().data_ptr():
            del states["param"]
        return states

    def allocate(self) -> None:
        """Make room for states before the first update."""
        main = self.optimizer._get_main_param_and_optimizer_states(self.param)["param"]
        self.optimizer.optimizer.initialize_state(main)


def _owners(optimizer: Any | None) -> dict[Tensor, _Owner | None]:
    """By trained parameter of this process; None where all of it belongs to other ranks."""
    owners: dict[Tensor, _Owner | None] = {}
    for part in _parts(optimizer):
        for buffer in part.buffers:
            owners |= dict.fromkeys(buffer.param_index_map)
        for param in part.model_param_gbuf_map:
            inside = part._get_model_param_range_map(param)["param"]
            owners[param] = _Owner(part, param, inside.start, inside.end)
    return owners


def _parts(optimizer: Any | None) -> list[Any]:
    """The distributed optimizers, of dense weights and of experts, that have anything to do on this rank."""
    chained = [] if optimizer is None else optimizer.chained_optimizers
    return [part for part in chained if not getattr(part, "is_stub_optimizer", False)]


def _num_copies(tensor: Tensor) -> int:
    """Ranks with the same weights, as replica_id counts them."""
    size: int = (
        parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        if getattr(tensor, "allreduce", True)
        else parallel_state.get_expert_data_parallel_world_size()
    )
    return size


def _entries(models: Sequence[torch.nn.Module]) -> Iterator[_Entry]:
    metadata = {
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    for model in models:
        inner: Any = unwrap(model)
        for entry in nested_values(inner.sharded_state_dict(metadata=metadata)):
            if not isinstance(entry, ShardedObject):  # those are empty states of modules
                pp_copy, tp_copy, dp_rank = entry.replica_id
                yield _Entry(entry.data, tuple(_parts_of(entry)), pp_copy == tp_copy == 0, dp_rank)


def _parts_of(entry: ShardedTensor | ShardedTensorFactory) -> Iterator[_Part]:
    built = nested_values(entry.build()) if isinstance(entry, ShardedTensorFactory) else [entry]
    for part in built:
        yield _Part(
            part.key,
            tuple(part.global_shape),
            tuple(part.global_offset),
            (1,) * part.prepend_axis_num + tuple(part.local_shape),
            (part.data.data_ptr() - entry.data.data_ptr()) // part.data.itemsize,
        )


def _cut(entry: _Entry, prefix: str, flat: Tensor, first: int) -> Iterator[Piece]:
    """Boxes of what flat holds: the elements from `first` on of the entry's flat tensor."""
    for part in entry.parts:
        start, end = max(first, part.start), min(first + flat.numel(), part.start + math.prod(part.shape))
        for offset, size in boxes(part.shape, start - part.start, end - part.start):
            stop = start + math.prod(size)
            place = tuple(a + b for a, b in zip(part.offset, offset, strict=True))
            yield Piece(f"{prefix}{part.key}", part.whole, place, flat[start - first : stop - first].view(size))
            start = stop
