# SPDX-License-Identifier: Apache-2.0
"""A rehearsal as a trace for Perfetto or chrome://tracing: device memory by category, phases, and every message.

Comes after the record of a rank. The format is the JSON object of the Trace Event Format. A rehearsal has no clock, so
one microsecond of the trace is one device operator.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from mindvl_train.rehearsal.matching import group_text
from mindvl_train.rehearsal.record import Message, RankRecord

_PHASES = 0  # thread of the phases; those of the groups follow
_LEAST = 0.001  # microseconds between messages that no operator separates


def trace(records: Sequence[RankRecord]) -> dict[str, Any]:
    """The trace of several ranks, one process each."""
    events = [event for record in records for event in _events(record)]
    about = "One microsecond is one device operator. Counters: live device bytes by category."
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"about": about}}


def _events(record: RankRecord) -> Iterator[dict[str, Any]]:
    base = {"pid": record.rank}
    yield base | {"name": "process_name", "ph": "M", "args": {"name": f"rank {record.rank}"}}
    yield base | {"name": "process_sort_index", "ph": "M", "args": {"sort_index": record.rank}}
    yield base | {"name": "thread_name", "ph": "M", "tid": _PHASES, "args": {"name": "phases"}}
    for phase in record.phases:
        yield base | {
            "name": phase.name if phase.step < 0 else f"{phase.name} {phase.step}",
            "cat": "phase", "ph": "X", "tid": _PHASES, "ts": phase.first_operator, "dur": phase.num_operators,
            "args": {"peak_bytes": phase.peak_bytes, "flops": phase.flops},
        }  # fmt: skip
    for point in record.timeline:
        held = dict(zip(record.categories, point.held, strict=True)) if record.categories else {"all": point.num_bytes}
        yield base | {"name": "device memory", "cat": "memory", "ph": "C", "ts": point.operator, "args": held}
    by_group: defaultdict[str, list[Message]] = defaultdict(list)
    for message in record.messages:
        by_group[message.group].append(message)
    starts = _starts(record.messages)
    for thread, (group, messages) in enumerate(sorted(by_group.items()), start=1):
        name = group_text(record.groups[group])
        yield base | {"name": "thread_name", "ph": "M", "tid": thread, "args": {"name": name}}
        ends = [starts[following.index] for following in messages[1:]]
        for message, end in zip(messages, [*ends, starts[-1]], strict=True):
            begin = starts[message.index]
            # Messages of a group run one after another; one that is never awaited is shown until the next.
            if message.waited_at is not None or not message.is_async:
                end = min(end, starts[message.waited_at or message.index + 1])
            yield base | {
                "name": message.kind, "cat": "message", "ph": "X", "tid": thread, "ts": begin,
                "dur": round(max(_LEAST / 2, end - begin), 6),
                "args": {
                    "bytes": message.num_bytes, "dtype": message.dtype, "shapes": [list(shape) for shape in message.shapes],
                    "peer": message.peer, "source": message.source, "index": message.index,
                },
            }  # fmt: skip


def _starts(messages: Sequence[Message]) -> list[float]:
    """Time of each message and of the end: strictly ascending, also where no operator is between two."""
    starts = [float(message.operator) for message in messages]
    starts.append(max(starts, default=0.0) + 1)
    for index in range(1, len(starts)):
        starts[index] = round(max(starts[index], starts[index - 1] + _LEAST), 6)
    return starts
