# SPDX-License-Identifier: Apache-2.0
"""Compare the messages of rehearsed ranks, group by group: a difference is a step that hangs or fails on the cluster.

Comes after the records of all ranks; deadlocks.py simulates the order once the sequences agree. Rules:

- The collectives of all members of a group must agree in number, order, kind, data type and shape.
- The sends of one rank to another meet the receives of the other from it, in order. Sends and receives in opposite
  directions have no order here, nor have the members of one batch to different ranks.
- A rank that was not rehearsed has the messages of the rehearsed rank of its class, moved to its own groups: the same
  group name, and the same distance to the other rank. A rank without such a record is not compared.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from mindvl_train.rehearsal.classes import RankClass
from mindvl_train.rehearsal.record import POINT_TO_POINT, Group, Message, RankRecord

# Kinds whose tensors may differ between ranks: the shapes depend on the rank, or objects are pickled.
_UNEQUAL_SIZES = {"gather", "scatter", "all_gather_object", "broadcast_object", "barrier"}
MIRROR = {"send": "recv", "recv": "send"}
Role = tuple[str, str, tuple[int, ...], int]


@dataclass(frozen=True, kw_only=True)
class Side:
    """One rank's message at the place where sequences differ; None: it has no further message."""

    rank: int
    message: Message | None


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """The first difference between two ranks in one group, or in one direction between two ranks."""

    group: str
    position: int  # number of the message in the group, from 0
    reason: str  # what differs, such as "shape"
    sides: tuple[Side, Side]

    def __str__(self) -> str:
        first, second = (_side_text(side) for side in self.sides)
        return f"{self.group}: message {self.position} differs in {self.reason}: {first}, but {second}."


class World:
    """All ranks of a job by the records of the rehearsed ones."""

    def __init__(self, records: Mapping[int, RankRecord], classes: Sequence[RankClass]) -> None:
        self.records = dict(sorted(records.items()))
        self._of_class: dict[int, int] = {}
        for each in classes:
            rehearsed = next((rank for rank in each.ranks if rank in self.records), None)
            if rehearsed is not None:
                self._of_class.update(dict.fromkeys(each.ranks, rehearsed))
        self.logs = {rank: Log(record) for rank, record in self.records.items()}

    def stand_in(self, rank: int) -> int | None:
        """The rehearsed rank whose messages stand for those of `rank`; None: no rank of its class was rehearsed."""
        return rank if rank in self.records else self._of_class.get(rank)

    def members(self, group: Group) -> list[int]:
        """The rehearsed ranks that stand for the members of a group, each once."""
        return sorted({found for rank in group.ranks if (found := self.stand_in(rank)) is not None})

    def peer(self, rank: int, message: Message) -> tuple[int, int] | None:
        """(rehearsed rank that stands for the other end, the rank that it sees at this end); None: not rehearsed."""
        assert message.peer is not None
        other = self.stand_in(message.peer)
        # Coordinates are the digits of a rank, so the distance between two ranks is the same at every place.
        return None if other is None else (other, other + rank - message.peer)


class Log:
    """The messages of one rank by group and by direction; groups are identified by their role.

    A role is (name, backend, distances between the members, number among the rank's groups with these). It is the same on
    every member, and for the groups of one kind at other places of the layout.
    """

    def __init__(self, record: RankRecord) -> None:
        self.record = record

    @cached_property
    def roles(self) -> dict[str, Role]:
        """The role of each group of the record by its key."""
        found: dict[str, Role] = {}
        seen: defaultdict[tuple[str, str, tuple[int, ...]], int] = defaultdict(int)
        for key, group in self.record.groups.items():
            steps = {after - before for before, after in pairwise(group.ranks)}
            distances = (
                (*steps, len(group.ranks)) if len(steps) == 1 else tuple(r - group.ranks[0] for r in group.ranks)
            )
            kind = (group.name, group.backend, distances)
            found[key] = (*kind, seen[kind])
            seen[kind] += 1
        return found

    @cached_property
    def collectives(self) -> dict[Role, list[Message]]:
        """Collectives in order."""
        found: defaultdict[Role, list[Message]] = defaultdict(list)
        for message in self.record.messages:
            if message.kind not in POINT_TO_POINT:
                found[self.roles[message.group]].append(message)
        return dict(found)

    @cached_property
    def directions(self) -> dict[tuple[Role, str, int], list[Message]]:
        """Sends and receives in order, by (role, kind, other rank)."""
        found: defaultdict[tuple[Role, str, int], list[Message]] = defaultdict(list)
        for message in self.record.messages:
            if message.kind in POINT_TO_POINT:
                assert message.peer is not None
                found[self.roles[message.group], message.kind, message.peer].append(message)
        return dict(found)


def find_mismatches(world: World) -> list[Mismatch]:
    """The first difference of every pair of ranks that disagree, by group; empty if all sequences agree."""
    return [*_collective_mismatches(world), *_point_to_point_mismatches(world)]


def _collective_mismatches(world: World) -> Iterator[Mismatch]:
    compared: set[tuple[Role, int, int]] = set()
    for rank, log in world.logs.items():
        for key, group in log.record.groups.items():
            role = log.roles[key]
            mine = log.collectives.get(role, [])
            for other in world.members(group):
                pair = (role, min(rank, other), max(rank, other))
                if other == rank or pair in compared:
                    continue
                compared.add(pair)
                theirs = world.logs[other].collectives.get(role, [])
                found = _first_difference(mine, theirs)
                if found is None and other in group.ranks:
                    found = _first_difference_inside(mine, theirs, group.ranks.index(rank), group.ranks.index(other))
                if found is not None:
                    yield _mismatch(group, found, (rank, mine), (other, theirs))


def _point_to_point_mismatches(world: World) -> Iterator[Mismatch]:
    for rank, log in world.logs.items():
        for (role, kind, _), mine in log.directions.items():
            found = world.peer(rank, mine[0])
            if found is None:
                continue
            other, seen_from_there = found
            theirs = world.logs[other].directions.get((role, MIRROR[kind], seen_from_there), [])
            if kind == "recv" and theirs and world.peer(other, theirs[0]) == (rank, mine[0].peer):
                continue  # reported from the sender
            difference = _first_difference(mine, theirs)
            if difference is not None:
                yield _mismatch(log.record.groups[mine[0].group], difference, (rank, mine), (other, theirs))


def _mismatch(
    group: Group, found: tuple[int, str], mine: tuple[int, list[Message]], theirs: tuple[int, list[Message]]
) -> Mismatch:
    position, reason = found
    sides = [
        Side(rank=rank, message=messages[position] if position < len(messages) else None)
        for rank, messages in (mine, theirs)
    ]
    return Mismatch(group=group_text(group), position=position, reason=reason, sides=(sides[0], sides[1]))


def _first_difference(mine: Sequence[Message], theirs: Sequence[Message]) -> tuple[int, str] | None:
    """(position, what differs)."""
    for position, (one, other) in enumerate(zip(mine, theirs, strict=False)):
        reason = _difference(one, other)
        if reason is not None:
            return position, reason
    return None if len(mine) == len(theirs) else (min(len(mine), len(theirs)), "number of messages")


def _first_difference_inside(
    mine: Sequence[Message], theirs: Sequence[Message], my_place: int, their_place: int
) -> tuple[int, str] | None:
    """(position, what differs) of two members of one group: the root, or the rows that one sends the other."""
    for position, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        if one.peer != other.peer:
            return position, "root"
        if one.splits and other.splits and all(one.splits + other.splits):
            (sent, received), (their_sent, their_received) = one.splits, other.splits
            if sent[their_place] != their_received[my_place] or received[their_place] != their_sent[my_place]:
                return position, "rows of all_to_all"
    return None


def _difference(one: Message, other: Message) -> str | None:
    if one.kind in POINT_TO_POINT:
        if (one.batch is None) != (other.batch is None):
            return "batching"  # a batch has its own communicator
    elif one.kind != other.kind:
        return "kind"
    if one.dtype != other.dtype:
        return "data type"
    if one.kind in _UNEQUAL_SIZES or one.dtype == "object":
        return None
    if one.splits or other.splits:  # the first axis is exchanged by rows
        is_equal = [shape[1:] for shape in one.shapes] == [shape[1:] for shape in other.shapes]
        return None if is_equal else "shape"
    return None if one.shapes == other.shapes else "shape"


def group_text(group: Group) -> str:
    """Such as "TENSOR_MODEL_PARALLEL_GROUP of ranks 0, 1"."""
    ranks = group.ranks
    if len(ranks) <= 8:
        return f"{group.name} of ranks {', '.join(map(str, ranks))}"
    return f"{group.name} of {len(ranks):,} ranks {ranks[0]} to {ranks[-1]}"


def message_text(message: Message) -> str:
    """Such as "all_reduce of bfloat16 [8192, 4096] at mindvl_train/step.py:61"."""
    tensors = ", ".join(str(list(shape)) for shape in message.shapes[:3])
    more = f" and {len(message.shapes) - 3} more" if len(message.shapes) > 3 else ""
    if message.kind in POINT_TO_POINT:
        toward = f" {'to' if message.kind == 'send' else 'from'} rank {message.peer}"
    else:
        toward = f" with root {message.peer}" if message.peer is not None else ""
    return f"{message.kind}{toward} of {message.dtype} {tensors}{more} at {message.source}"


def _side_text(side: Side) -> str:
    if side.message is None:
        return f"rank {side.rank} has no further message"
    return f"rank {side.rank} issues {message_text(side.message)} (its message {side.message.index})"
