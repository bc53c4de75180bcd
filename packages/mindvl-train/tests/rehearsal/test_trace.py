# SPDX-License-Identifier: Apache-2.0
"""The trace of a rehearsal follows the documented Trace Event Format, and its slices do not overlap."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest

from mindvl_train.rehearsal.record import MemoryPoint, PhaseRecord
from mindvl_train.rehearsal.trace import trace


@pytest.fixture
def record(world, collective):
    """Two groups; the first message of tp is awaited after the second of dp, and one is never awaited."""
    messages = [
        collective("all_gather", "tp", is_async=True, waited_at=3, operator=10),
        collective("all_reduce", "dp", operator=10),
        collective("all_gather", "tp", is_async=True, waited_at=None, operator=12),
        collective("all_reduce", "dp", operator=20),
    ]
    made = world({0: messages}, {"tp": [0, 1], "dp": [0, 1]}).records[0]
    phase = PhaseRecord(
        name="compute", step=0, first_operator=4, num_operators=20, flops=1.0, bytes_read=0.0, bytes_written=0.0,
        peak_bytes=900, end_bytes=100, wall_s=0.1,
    )  # fmt: skip
    points = (MemoryPoint(operator=4, num_bytes=900, phase=0, held=(600, 300)),)
    return replace(made, phases=(phase,), timeline=points, categories=("parameters", "gradients"))


def test_every_event_has_the_fields_of_its_phase_letter(record):
    document = json.loads(json.dumps(trace([record])))
    wanted = {
        "X": {"name", "cat", "ts", "dur", "pid", "tid"},
        "C": {"name", "ts", "pid", "args"},
        "M": {"name", "args"},
    }
    assert document["traceEvents"]
    for event in document["traceEvents"]:
        assert wanted[event["ph"]] <= event.keys(), event
        assert all(isinstance(event.get(key, 0), int | float) for key in ("ts", "dur", "pid", "tid"))


def test_memory_is_a_counter_of_bytes_by_category(record):
    counters = [event for event in trace([record])["traceEvents"] if event["ph"] == "C"]
    assert [(event["ts"], event["args"]) for event in counters] == [(4, {"parameters": 600, "gradients": 300})]


def test_slices_of_a_group_have_a_length_and_do_not_overlap(record):
    events = trace([record])["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert sorted(names.values()) == ["dp of ranks 0, 1", "phases", "tp of ranks 0, 1"]
    for thread in names:
        slices = [(e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == thread]
        assert all(length > 0 for _, length in slices)
        assert all(begin + length <= later for (begin, length), (later, _) in pairwise(slices))


def test_a_slice_ends_where_the_message_is_awaited_or_the_next_of_its_group_begins(record):
    (tp,) = [e["tid"] for e in trace([record])["traceEvents"] if e["args"].get("name") == "tp of ranks 0, 1"]
    slices = [e for e in trace([record])["traceEvents"] if e["ph"] == "X" and e["tid"] == tp]
    assert [(e["ts"], round(e["ts"] + e["dur"], 3)) for e in slices] == [(10, 12), (12, 21)]
