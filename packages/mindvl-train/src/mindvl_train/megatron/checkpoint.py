# SPDX-License-Identifier: Apache-2.0
"""Model and optimizer state of this rank, split into pieces: boxes of the global tensors.

Comes after model and optimizer are built, before tensor_files.py, which writes and reads the pieces. Names and offsets are
megatron-core's (`sharded_state_dict`), so they are the same in every parallel layout. The distributed optimizer keeps its
state in flat slices, one per rank with the same weights; a flat slice of a matrix is at most three boxes. Every rank
writes the pieces it owns without a gather, unlike megatron-core's resharding format.
"""

import math
import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from torch import Tensor

from mindvl_model.megatron.adapters import is_adapter
from mindvl_model.parameters import named_tensors

STATE = "optimizer.state"  # for example optimizer.state.exp_avg.KEY of the weights KEY
MASTER = f"{STATE}.param."

# Exceptions of reads of damaged tensors.
DAMAGE = (FileNotFoundError, EOFError, RuntimeError, ValueError, KeyError, pickle.UnpicklingError)


@dataclass(frozen=True)
class Piece:
    """A box of a global tensor."""

    key: str
    whole: tuple[int, ...]  # shape of the global tensor in the checkpoint
    offset: tuple[int, ...]  # offset of the box in the global tensor
    content: Tensor  # content of the box, same number of axes; shares memory with model or optimizer


@dataclass(frozen=True)
class _Part:
    """A range of a flattened parameter, and its box in the checkpoint."""

    key: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int  # index in the flattened parameter


@dataclass(frozen=True)
class _Entry:
    """One parameter or buffer of the model."""

    tensor: Tensor
    parts: tuple[_Part, ...]  # two for a gated matrix, whose halves are apart in the global tensor
    is_main: bool  # whether this is the tensor- and pipeline-parallel rank that saves it
    dp_rank: int  # rank among those with the same weights


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The MindVLModel inside gradient buffers and precision wrappers."""
    while isinstance(inner := getattr(model, "module", None), torch.nn.Module):
        model = inner
    return model


def owned_pieces(models: Sequence[torch.nn.Module], optimizer: Any) -> list[Piece]:
    """The pieces that this rank saves; each element is saved by exactly one rank.

    Trained weights are saved by the rank that has their optimizer state, because with overlap the other ranks receive
    the updated weights in the next forward. Frozen weights are distributed over the ranks.
    """
    owners = _owners(optimizer)
    pieces: list[Piece] = []
    for number, entry in enumerate(_entries(models)):
        if not entry.is_main:
            continue
        if entry.tensor in owners:
            owner = owners[entry.tensor]
            if owner is not None:
                owner.allocate()  # the run may stop after only skipped steps
                weights = entry.tensor.detach().view(-1)[owner.start : owner.end]
                pieces += _cut(entry, "", weights, owner.start)
                for name, state in owner.states().items():
                    pieces += _cut(entry, f"{STATE}.{name}.", state, owner.start)
        elif number % _num_copies(entry.tensor) == entry.dp_rank:
            pieces += _cut(entry, "", entry.tensor.detach().view(-1), 0)
    return pieces


def wanted_pieces(models: Sequence[torch.nn.Module], optimizer: Any | None) -> list[Piece]:
    """The pieces that this rank loads: all its weights and its slices of the optimizer state."""
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


def unset_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name that no checkpoint stores, so that loading one leaves them without a value.

    Of a model with adapters, checkpoints store the adapters only.
    """
    stored = {entry.tensor.data_ptr() for entry in _entries([model])}
    held = named_tensors(unwrap(model))
    wanted = _stored_names(held)
    return {name: held[name] for name in wanted if held[name].data_ptr() not in stored and held[name].numel()}


def allocate_states(optimizer: Any) -> None:
    """Allocate the states of all parameters that this rank updates, as after a resume."""
    for owner in _owners(optimizer).values():
        if owner is not None:
            owner.allocate()


def optimizer_steps(optimizer: Any) -> int:
    """Number of optimizer updates, used by bias correction; 0 if this rank trains no parameter."""
    return max((int(group.get("step", 0)) for part in _parts(optimizer) for group in part.param_groups), default=0)


def set_optimizer_steps(optimizer: Any, steps: int) -> None:
    """Set the number of optimizer updates after the state is loaded."""
    for part in _parts(optimizer):
        for group in part.optimizer.param_groups:
            group["step"] = steps


def boxes(shape: tuple[int, ...], start: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The elements from start to end of a row-major array as boxes (offset, size), in order."""
    if start >= end:
        return
    if len(shape) < 2:
        yield ((), ()) if not shape else ((start,), (end - start,))
        return
    row = math.prod(shape[1:])
    (first, in_first), (last, in_last) = divmod(start, row), divmod(end, row)
    if first == last:
        yield from (((first, *offset), (1, *size)) for offset, size in boxes(shape[1:], in_first, in_last))
        return
    if in_first:
        yield from (((first, *offset), (1, *size)) for offset, size in boxes(shape[1:], in_first, row))
        first += 1
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from (((last, *offset), (1, *size)) for offset, size in boxes(shape[1:], 0, in_last))


@dataclass(frozen=True)
class _Owner:
    """This rank's slice of a trained parameter, and the optimizer that updates it."""

    optimizer: Any
    param: Tensor
    start: int
    end: int

    def states(self) -> dict[str, Tensor]:
        """Flat state tensors by name; without master weights if they share memory with the weights."""
        held = self.optimizer._get_main_param_and_optimizer_states(self.param)
        states = {name: state for name, state in held.items() if name != "step"}
        if states["param"].untyped_storage()._cdata == self.param.untyped_storage()._cdata:
            del states["param"]
        return states

    def allocate(self) -> None:
        """Allocate the states, which otherwise happens in the first update."""
        main = self.optimizer._get_main_param_and_optimizer_states(self.param)["param"]
        self.optimizer.optimizer.initialize_state(main)


def _owners(optimizer: Any | None) -> dict[Tensor, _Owner | None]:
    """The slice of each trained parameter; None if it belongs to other ranks completely."""
    owners: dict[Tensor, _Owner | None] = {}
    for part in _parts(optimizer):
        for buffer in part.buffers:
            owners |= dict.fromkeys(buffer.param_index_map)
        for param in part.model_param_gbuf_map:
            inside = part._get_model_param_range_map(param)["param"]
            owners[param] = _Owner(part, param, inside.start, inside.end)
    return owners


def _parts(optimizer: Any | None) -> list[Any]:
    """The distributed optimizers, of dense weights and of experts, that have parameters on this rank."""
    chained = [] if optimizer is None else optimizer.chained_optimizers
    return [part for part in chained if not getattr(part, "is_stub_optimizer", False)]


def _stored_names(names: Iterable[str]) -> list[str]:
    """Of the names of a model, those that a checkpoint stores: adapters if it has any."""
    found = list(names)
    return [name for name in found if is_adapter(name)] or found


def _num_copies(tensor: Tensor) -> int:
    """Number of ranks with the same weights, as counted by replica_id."""
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
        state = inner.sharded_state_dict(metadata=metadata)
        for entry in nested_values({name: state[name] for name in _stored_names(state)}):
            if not isinstance(entry, ShardedObject):  # empty states of modules
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
            part.data.storage_offset() - entry.data.storage_offset(),  # both are views of one storage
        )


def _cut(entry: _Entry, prefix: str, flat: Tensor, first: int) -> Iterator[Piece]:
    """Pieces of flat, which has the elements from `first` of the flattened tensor of the entry."""
    for part in entry.parts:
        start, end = max(first, part.start), min(first + flat.numel(), part.start + math.prod(part.shape))
        for offset, size in boxes(part.shape, start - part.start, end - part.start):
            stop = start + math.prod(size)
            whole_offset = tuple(a + b for a, b in zip(part.offset, offset, strict=True))
            yield Piece(f"{prefix}{part.key}", part.whole, whole_offset, flat[start - first : stop - first].view(size))
            start = stop
