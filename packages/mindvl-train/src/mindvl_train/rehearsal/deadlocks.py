# SPDX-License-Identifier: Apache-2.0
"""Simulate the order in which rehearsed ranks issue and await messages, and report a deadlock with its cycle.

Comes after matching.py, when the sequences of every group agree: ranks can still wait for each other in a cycle over
several groups. Rules, which are those of NCCL and HCCL:

- A rank issues its messages in order. An asynchronous message holds it only at its wait.
- Messages of one group run in their order. A send or receive outside a batch runs on a communicator of the two ranks,
  so it waits for earlier ones between these two only. A batch of sends and receives is one message of its group.
- A message is complete when every rank of it has reached it; a send without its receive is not complete.
- A rank that was not rehearsed moves with the rehearsed rank of its class. One without a record is always ready.
"""

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from mindvl_train.rehearsal.matching import MIRROR, Log, World, message_text
from mindvl_train.rehearsal.record import POINT_TO_POINT, Message


@dataclass(frozen=True, kw_only=True)
class Blocked:
    """A rank that waits, and the rank for which it waits."""

    rank: int
    message: Message  # the message that the rank waits for
    waits_for: int  # rank that has not reached it


@dataclass(frozen=True, kw_only=True)
class Deadlock:
    """Ranks that wait for each other; the last waits for the first, or for a rank at its end."""

    cycle: tuple[Blocked, ...]

    def __str__(self) -> str:
        waits = [
            f"rank {each.rank} waits in its message {each.message.index}, {message_text(each.message)}, for rank "
            f"{each.waits_for}"
            for each in self.cycle
        ]
        return f"deadlock of {len(self.cycle)} ranks: {'; '.join(waits)}."


@dataclass
class _Entry:
    """A message, or the members of one batch."""

    messages: list[Message]
    stream: tuple[object, ...]
    partners: list[tuple[int, int]] = field(default_factory=list)  # (rank, number of its entry)
    is_issued: bool = False
    is_done: bool = False


class _Rank:
    """One rehearsed rank in the simulation."""

    def __init__(self, log: Log) -> None:
        self.entries: list[_Entry] = []
        self.entry_of: dict[int, int] = {}  # message -> entry
        self.next = 0  # position in actions
        batches: dict[int, int] = {}
        for message in log.record.messages:
            role = log.roles[message.group]
            if message.batch is not None and message.batch in batches:
                number = batches[message.batch]
                self.entries[number].messages.append(message)
            else:
                number = len(self.entries)
                is_pair = message.kind in POINT_TO_POINT and message.batch is None
                pair = (min(log.record.rank, message.peer or 0), max(log.record.rank, message.peer or 0))
                self.entries.append(_Entry([message], (role, *pair) if is_pair else (role,)))
                if message.batch is not None:
                    batches[message.batch] = number
            self.entry_of[message.index] = number
        self.actions = list(self._actions(log))
        self.waiting: defaultdict[tuple[object, ...], deque[int]] = defaultdict(deque)  # issued, not complete

    def _actions(self, log: Log) -> Iterator[tuple[bool, int]]:
        """(is an issue, number of the entry) in the order of the host."""
        waits: defaultdict[int, list[int]] = defaultdict(list)
        for message in log.record.messages:
            number = self.entry_of[message.index]
            if not message.is_async:
                waits[self.entries[number].messages[-1].index + 1].append(number)
            elif message.waited_at is not None:
                waits[message.waited_at].append(number)
        for message in log.record.messages:
            yield from ((False, number) for number in dict.fromkeys(waits.pop(message.index, ())))
            number = self.entry_of[message.index]
            if self.entries[number].messages[-1] is message:
                yield True, number
        # Nothing may be left at the end, awaited or not.
        yield from ((False, number) for number in range(len(self.entries)))


def find_deadlock(world: World) -> Deadlock | None:
    """Simulate all rehearsed ranks; None if every rank reaches its end.

    Args:
        world: Ranks without mismatches (matching.find_mismatches).
    """
    ranks = {rank: _Rank(log) for rank, log in world.logs.items()}
    _link(world, ranks)
    todo = deque(ranks)
    while todo:
        rank = todo.popleft()
        for other in _advance(rank, ranks):
            if other not in todo:
                todo.append(other)
    stuck = [rank for rank, state in ranks.items() if state.next < len(state.actions)]
    return _cycle(stuck[0], ranks) if stuck else None


def _link(world: World, ranks: dict[int, _Rank]) -> None:
    """Find the counterparts of every entry."""
    for rank, log in world.logs.items():
        entries = ranks[rank]
        for key, group in log.record.groups.items():
            role = log.roles[key]
            others = [other for other in world.members(group) if other != rank]
            for place, message in enumerate(log.collectives.get(role, ())):
                entry = entries.entries[entries.entry_of[message.index]]
                for other in others:
                    theirs = world.logs[other].collectives[role]
                    entry.partners.append((other, ranks[other].entry_of[theirs[place].index]))
        for (role, kind, _), mine in log.directions.items():
            found = world.peer(rank, mine[0])
            if found is None:
                continue
            other, seen_from_there = found
            theirs = world.logs[other].directions[role, MIRROR[kind], seen_from_there]
            for message, counterpart in zip(mine, theirs, strict=True):
                entry = entries.entries[entries.entry_of[message.index]]
                entry.partners.append((other, ranks[other].entry_of[counterpart.index]))


def _advance(rank: int, ranks: dict[int, _Rank]) -> set[int]:
    """Run one rank as far as possible; returns the ranks whose messages may now be complete."""
    state, woken = ranks[rank], set[int]()
    moved = True
    while moved:
        moved = False
        while state.next < len(state.actions):
            is_issue, number = state.actions[state.next]
            entry = state.entries[number]
            if is_issue:
                entry.is_issued = True
                queue = state.waiting[entry.stream]
                queue.append(number)
                if len(queue) == 1:  # it is at the front, so its partners see that this rank has reached it
                    woken |= {other for other, _ in entry.partners}
            elif not entry.is_done:
                break
            state.next += 1
        for queue in state.waiting.values():
            while queue and _is_met(state.entries[queue[0]], ranks):
                state.entries[queue.popleft()].is_done = moved = True
                if queue:
                    woken |= {other for other, _ in state.entries[queue[0]].partners}
    return woken


def _is_met(entry: _Entry, ranks: dict[int, _Rank]) -> bool:
    return all(_has_reached(ranks[other], number) for other, number in entry.partners)


def _has_reached(state: _Rank, number: int) -> bool:
    """Whether a message is issued, and the messages before it in its stream are complete."""
    entry = state.entries[number]
    return entry.is_done or (entry.is_issued and state.waiting[entry.stream][0] == number)


def _cycle(start: int, ranks: dict[int, _Rank]) -> Deadlock:
    """Follow the waits from a rank that is stuck until a rank comes again."""
    path: list[Blocked] = []
    places: dict[int, int] = {}
    rank = start
    while rank not in places:
        places[rank] = len(path)
        state = ranks[rank]
        entry = state.entries[state.actions[state.next][1]]
        if entry.is_issued:  # a message before it in its stream may be the one that is stuck
            entry = state.entries[state.waiting[entry.stream][0]]
        other = next(other for other, number in entry.partners if not _has_reached(ranks[other], number))
        path.append(Blocked(rank=rank, message=entry.messages[0], waits_for=other))
        rank = other
    return Deadlock(cycle=tuple(path[places[rank] :]))
