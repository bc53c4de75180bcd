# SPDX-License-Identifier: Apache-2.0
"""What one rehearsed rank did: messages, memory, operators and host waits, as one JSON file per rank.

Written by rehearse.py; read by everything that reports on a rehearsal. It imports neither torch nor megatron-core.
"""

import json
import types
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Self, Union, cast, get_args, get_origin, get_type_hints

from mindvl_train.errors import TrainError

FORMAT = 1

MessageKind = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter",
    "barrier", "send", "recv", "all_gather_object", "broadcast_object",
]  # fmt: skip
WaitKind = Literal["read", "copy to host", "blocking copy to device"]
POINT_TO_POINT: tuple[MessageKind, ...] = ("send", "recv")

# Categories of device memory. Activations are "activations/MODULE", such as "activations/vision".
Category = str


@dataclass(frozen=True, kw_only=True)
class Message:
    """One collective or one half of a point-to-point message, in the order in which the host issues them."""

    index: int  # position in the sequence of this rank, from 0
    step: int  # -1 before the first step
    phase: str  # name of the phase, as in RankRecord.phases
    microbatch: int | None  # index in the step; None: outside the microbatches, or in a backward pass
    kind: MessageKind
    group: str  # key of RankRecord.groups
    peer: int | None = None  # global rank: receiver of a send, sender of a recv, root of a broadcast
    batch: int | None = None  # members of one batch_isend_irecv share an id; order inside a batch means nothing
    tag: int = 0
    dtype: str  # such as "bfloat16"; "object" for pickled objects
    shapes: tuple[tuple[int, ...], ...]  # of the tensors that this rank gives
    num_elements: int  # sum over shapes
    num_bytes: int
    splits: tuple[tuple[int, ...], ...] = ()  # all_to_all: (sent rows by rank, received rows by rank); () if equal
    is_async: bool  # the host does not wait for it before the call returns
    waited_at: int | None = None  # index of the next message when its wait() was called; None: never
    on_host: bool = False  # tensors or objects on the host
    operator: int  # number of operators issued before it
    source: str  # nearest line of mindvl or megatron-core, such as "mindvl_train/step.py:61"
    caller: str  # nearest line of mindvl


@dataclass(frozen=True, kw_only=True)
class Group:
    """One process group that a message uses."""

    name: str  # the description that megatron-core gives, such as "TENSOR_MODEL_PARALLEL_GROUP"
    ranks: tuple[int, ...]  # global ranks, in the order of the group
    backend: str  # that of the real run, such as "hccl" or "gloo"


@dataclass(frozen=True, kw_only=True)
class PhaseRecord:
    """One part of a step, or of the start; consecutive phases follow each other without a gap."""

    name: str  # build, wrap, optimizer; then per step: data, compute, reduce, update
    step: int
    first_operator: int  # number of device operators issued before the phase
    num_operators: int
    flops: float
    bytes_read: float
    bytes_written: float
    peak_bytes: int  # of device memory during the phase
    end_bytes: int  # of device memory at its end
    wall_s: float  # time that the rehearsal took


@dataclass(frozen=True, kw_only=True)
class MemoryPoint:
    """Live device bytes after one change."""

    operator: int  # number of operators issued before it
    num_bytes: int
    phase: int  # index in RankRecord.phases
    held: tuple[int, ...] = ()  # bytes of each of RankRecord.categories


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The moment of most memory, and what is held then."""

    num_bytes: int
    operator: int
    operator_name: str
    phase: int  # index in RankRecord.phases
    source: str
    categories: dict[Category, int]  # parameters, gradients, optimizer, inputs, activations/MODULE, temporary, other


@dataclass(frozen=True, kw_only=True)
class OperatorCount:
    """All calls of one operator in the last step."""

    count: int
    flops: float
    bytes_read: float
    bytes_written: float


@dataclass(frozen=True, kw_only=True)
class HostWait:
    """A line where the host waits for the device in the last step."""

    source: str  # nearest line of mindvl or megatron-core
    caller: str  # nearest line of mindvl
    operator: str  # such as "aten::_local_scalar_dense"
    kind: WaitKind
    count: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class MissingOperator:
    """An operator that the device library does not have: it is computed on the host, or stops the run."""

    source: str
    count: int


@dataclass(frozen=True, kw_only=True)
class CheckpointRecord:
    """What this rank writes for one checkpoint."""

    num_tensors: int
    num_chunks: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """The rehearsal of one rank of one job."""

    format: int = FORMAT
    recipe: str  # path or name as given
    recipe_digest: str  # SHA-256 of the resolved configuration, the world size and the number of steps
    versions: dict[str, str]  # mindvl-train, torch, megatron-core, torch-npu
    device: str  # as given, such as "910b2"
    device_kind: Literal["npu", "cuda", "cpu"]
    kernels: dict[str, str]  # operator: backend that ran, such as {"attention": "npu"}
    rank: int
    world_size: int
    coordinates: dict[str, int]  # tp, cp, pp, dp, ep, etp rank, each also as size, such as "tp_rank" and "tp_size"
    num_steps: int
    num_microbatches: int  # of each step
    pack: dict[str, int]  # tokens, patches, segments of every microbatch
    groups: dict[str, Group]
    messages: tuple[Message, ...]  # of the start and of all steps
    phases: tuple[PhaseRecord, ...]
    timeline: tuple[MemoryPoint, ...]  # thinned out; the highest point of each interval is kept
    categories: tuple[Category, ...] = ()  # names of MemoryPoint.held
    peak: Peak  # of the last step
    persistent: dict[Category, int]  # bytes between steps
    operators: dict[str, OperatorCount]  # of the last step
    waits: tuple[HostWait, ...]
    missing: dict[str, MissingOperator] = field(default_factory=dict)
    checkpoint: CheckpointRecord | None = None
    assumptions: tuple[str, ...] = ()  # how the answers of other ranks were chosen
    not_covered: tuple[str, ...] = ()  # what uses memory or time on a device and is not in this record
    wall_s: float
    host_peak_bytes: int

    @property
    def persistent_bytes(self) -> int:
        """Device bytes between steps."""
        return sum(self.persistent.values())

    def as_json(self) -> str:
        """The record as JSON; messages and points of the timeline as rows."""
        return json.dumps(_encode(self), separators=(",", ":")) + "\n"

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a record.

        Raises:
            TrainError: The file is not a record of this format.
        """
        try:
            document = json.loads(path.read_text())
            if document.get("format") != FORMAT:
                raise ValueError(f"format: is {document.get('format')!r}, must be {FORMAT}. Rehearse the recipe again.")
            return cast(Self, _decode(cls, document))
        except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
            reason = str(error).removesuffix(". Rehearse the recipe again.")
            raise TrainError(f"{path}: is not a rehearsal record: {reason}. Rehearse the recipe again.") from error


def progress_path(record_path: Path) -> Path:
    """File beside a record that is being made: the share of the forward passes that have begun."""
    return record_path.with_suffix(".progress")


def _encode(value: Any) -> Any:
    """Plain JSON values; a tuple of dataclasses becomes {"columns": names, "rows": values}."""
    if is_dataclass(value):
        return {each.name: _encode(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, dict):
        return {key: _encode(held) for key, held in value.items()}
    if isinstance(value, tuple) and value and is_dataclass(value[0]):
        names = [each.name for each in fields(value[0])]
        return {"columns": names, "rows": [[_encode(getattr(each, name)) for name in names] for each in value]}
    if isinstance(value, tuple):
        return [_encode(held) for held in value]
    return value


def _decode(kind: Any, value: Any) -> Any:
    """The value of a type annotation from plain JSON values."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return None if value is None else _decode(next(each for each in arguments if each is not type(None)), value)
    if origin is tuple and isinstance(value, dict):
        return tuple(
            _decode(arguments[0], dict(zip(value["columns"], row, strict=True)))
            for row in cast(list[Any], value["rows"])
        )
    if origin is tuple:
        return tuple(_decode(arguments[0], held) for held in value)
    if origin is dict:
        return {key: _decode(arguments[1], held) for key, held in value.items()}
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return cast(Any, kind)(**{name: _decode(hints[name], held) for name, held in value.items()})
    return value
