# SPDX-License-Identifier: Apache-2.0
"""Rehearsal records: what is written is what is read."""

import json

import pytest

from mindvl_train.errors import TrainError
from mindvl_train.rehearsal.record import (
    CheckpointRecord,
    Group,
    HostWait,
    MemoryPoint,
    Message,
    MissingOperator,
    OperatorCount,
    Peak,
    PhaseRecord,
    RankRecord,
)


def record_of_two_messages(**more) -> RankRecord:
    send = Message(
        index=0, step=-1, phase="build", microbatch=None, kind="send", group="g0", peer=1, batch=3, dtype="bfloat16",
        shapes=((2, 3), (4,)), num_elements=10, num_bytes=20, is_async=True, waited_at=1, operator=7,
        source="megatron/core/x.py:1", caller="mindvl_train/step.py:2",
    )  # fmt: skip
    gather = Message(
        index=1, step=0, phase="compute", microbatch=0, kind="all_to_all", group="g0", dtype="float32", shapes=((8,),),
        num_elements=8, num_bytes=32, splits=((3, 5), (4, 4)), is_async=False, operator=9,
        source="mindvl_train/step.py:3", caller="mindvl_train/step.py:3",
    )  # fmt: skip
    phase = PhaseRecord(
        name="build", step=-1, first_operator=0, num_operators=9, flops=1.5, bytes_read=2.0, bytes_written=3.0,
        peak_bytes=1024, end_bytes=512, wall_s=0.25,
    )  # fmt: skip
    fields = {
        "recipe": "recipe.yaml", "recipe_digest": "00", "versions": {"torch": "2"}, "device": "910b2",
        "device_kind": "npu", "kernels": {"attention": "npu"}, "rank": 0, "world_size": 2,
        "coordinates": {"tp_rank": 0, "tp_size": 2}, "num_steps": 1, "num_microbatches": 1, "pack": {"tokens": 8},
        "groups": {"g0": Group(name="TENSOR_MODEL_PARALLEL_GROUP", ranks=(0, 1), backend="hccl")},
        "messages": (send, gather), "phases": (phase,),
        "timeline": (MemoryPoint(operator=3, num_bytes=1024, phase=0),),
        "peak": Peak(
            num_bytes=1024, operator=3, operator_name="aten::mm", phase=0, source="x.py:1",
            categories={"parameters": 512, "activations/vision": 512},
        ),
        "persistent": {"parameters": 512, "other": 100},
        "operators": {"aten::mm": OperatorCount(count=2, flops=8.0, bytes_read=4.0, bytes_written=2.0)},
        "waits": (HostWait(source="a:1", caller="a:1", operator="aten::item", kind="read", count=1, num_bytes=4),),
        "missing": {"aten::xlogy": MissingOperator(source="b:2", count=3)},
        "checkpoint": CheckpointRecord(num_tensors=1, num_chunks=2, num_bytes=3),
        "assumptions": ("equal answers",), "wall_s": 1.0, "host_peak_bytes": 5,
    }  # fmt: skip
    return RankRecord(**{**fields, **more})


@pytest.mark.parametrize("more", [{}, {"messages": (), "missing": {}, "checkpoint": None}])
def test_a_record_is_read_as_it_was_written(more, tmp_path):
    written = record_of_two_messages(**more)
    (tmp_path / "rank.json").write_text(written.as_json())
    assert RankRecord.read(tmp_path / "rank.json") == written
    assert written.persistent_bytes == 612


def test_messages_are_written_as_rows():
    messages = json.loads(record_of_two_messages().as_json())["messages"]
    assert messages["columns"][:2] == ["index", "step"]
    assert [row[:2] for row in messages["rows"]] == [[0, -1], [1, 0]]


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "Expecting"), ('{"format": 99}', "format: is 99, must be 1"), ('{"format": 1}', "missing"), ("[]", "get")],
)
def test_another_file_is_refused_with_its_path(content, message, tmp_path):
    path = tmp_path / "rank.json"
    path.write_text(content)
    with pytest.raises(TrainError, match=rf"rank\.json: is not a rehearsal record: .*{message}"):
        RankRecord.read(path)
