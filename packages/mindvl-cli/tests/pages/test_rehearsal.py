# SPDX-License-Identifier: Apache-2.0
"""The page of a rehearsal: memory, messages, waits and verdict of records written by hand."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mindvl_cli.pages.plots import MAX_POINTS
from mindvl_cli.pages.rehearsal import memory_plot, rehearsal_page
from mindvl_cli.pipeline_file import load_recipe
from mindvl_train.devices import find_device
from mindvl_train.layout_search import Machine
from mindvl_train.layout_search.measure import job_of
from mindvl_train.rehearsal.classes import rank_classes, select_ranks
from mindvl_train.rehearsal.record import (
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
from mindvl_train.rehearsal.summary import counted_time, summarize
from mindvl_train.rehearsal.verdict import judge

RECIPE = Path(__file__).parents[4] / "recipes" / "tiny" / "sft.yaml"
ALL_REDUCE = Message(
    index=0, step=0, phase="reduce", microbatch=None, kind="all_reduce", group="3", dtype="float32", shapes=((1000,),),
    num_elements=1000, num_bytes=4000, is_async=False, operator=30, source="mindvl_train/step.py:1",
    caller="mindvl_train/step.py:1",
)  # fmt: skip


def record(rank: int, **more: Any) -> RankRecord:
    phase = PhaseRecord(
        name="compute", step=0, first_operator=0, num_operators=100, flops=4e9, bytes_read=1e6, bytes_written=1e6,
        peak_bytes=2_000_000_000, end_bytes=500_000_000, wall_s=1.0,
    )  # fmt: skip
    held = {"parameters": 500_000_000, "activations/vision <b>": 1_500_000_000}
    points = tuple(
        MemoryPoint(operator=at, num_bytes=sum(held.values()), phase=0, held=tuple(held.values())) for at in (0, 50, 99)
    )
    fields: dict[str, Any] = {
        "recipe": "recipe.yaml", "recipe_digest": "00", "versions": {"torch": "2"}, "device": "910b2",
        "device_kind": "npu", "kernels": {"attention": "npu"}, "rank": rank, "world_size": 2, "coordinates": {},
        "num_steps": 1, "num_microbatches": 2, "pack": {"tokens": 1024, "patches": 64, "segments": 2},
        "groups": {"3": Group(name="EMBEDDING_GROUP", ranks=(0, 1), backend="hccl")}, "messages": (ALL_REDUCE,),
        "phases": (phase,), "timeline": points, "categories": tuple(held),
        "peak": Peak(num_bytes=2_000_000_000, operator=50, operator_name="aten::mm", phase=0, source="a.py:1", categories=held),
        "persistent": {"parameters": 500_000_000},
        "operators": {
            "aten.mm.default": OperatorCount(count=4, flops=4e9, bytes_read=5e5, bytes_written=5e5),
            "aten.add.Tensor": OperatorCount(count=9, flops=0.0, bytes_read=5e5, bytes_written=5e5),
        },
        "waits": (HostWait(source="w.py:7", caller="w.py:7", operator="aten::item", kind="read", count=48, num_bytes=192),),
        "assumptions": ("equal answers",), "not_covered": ("workspaces",), "wall_s": 3.0, "host_peak_bytes": 5,
    }  # fmt: skip
    return RankRecord(**{**fields, **more})


def document_of(records: list[RankRecord], memory_bytes: float = 64e9) -> dict[str, Any]:
    config = load_recipe(RECIPE, ["parallel.pp_size=2", "global_batch_size=2"])
    job = job_of(config, 2)
    classes = rank_classes(job.run, job.pack)
    device = find_device("910b2")
    assert device is not None
    return summarize(
        records,
        job,
        classes,
        select_ranks(job.run, classes, None),
        judge(records, classes, memory_bytes=memory_bytes, kind="npu"),
        Machine(device=device, num_devices=2),
    )


def test_a_page_has_the_verdict_every_rank_and_loads_nothing() -> None:
    records = [record(0), record(1)]
    page = rehearsal_page(document_of(records), records)
    for text in (
        "fits: rank 0 needs the most memory, 5.0 GB of 60.2 GB usable", "EMBEDDING_GROUP of ranks 0, 1", "w.py:7",
        "aten.mm.default",
        "stage 0 of 2: 2 layers, vision encoder, projector, embedding", "equal answers", "workspaces", "pipeline bubble",
    ):  # fmt: skip
        assert text in page
    assert page.count('<svg class="plot"') == 2
    assert "activations/vision &lt;b&gt;" in page
    assert not re.search(r"(?:src|href)=[\"'](?!#|data:)", page)
    assert "Problems" not in page


def test_a_page_of_a_job_that_must_not_start_has_the_reasons() -> None:
    records = [
        record(0, missing={"aten::xlogy": MissingOperator(source="b.py:2", count=3)}),
        record(1, messages=(replace(ALL_REDUCE, dtype="bfloat16"),)),
    ]
    document = document_of(records, memory_bytes=4e9)
    assert not document["ok"]
    page = rehearsal_page(document, records)
    assert "does not fit: rank 0" in page
    assert "would hang or fail: EMBEDDING_GROUP of ranks 0, 1: message 0 differs in data type" in page
    assert "Operators that the device library lacks" in page


def test_counts_and_bytes_of_messages_are_those_of_one_step() -> None:
    later = [replace(ALL_REDUCE, index=number, step=1) for number in (1, 2)]
    document = document_of([record(rank, num_steps=2, messages=(ALL_REDUCE, *later)) for rank in (0, 1)])
    assert [(row["kind"], row["count"], row["num_bytes"]) for row in document["ranks"][0]["messages"]] == [
        ("all_reduce", 2, 8000)
    ]


def test_counted_time_is_that_of_the_rates_of_the_machine() -> None:
    """4 GFLOP at 0.58 of 376 TFLOP/s; 1 MB at 0.75 of 1,800 GB/s; 4 kB all-reduced by two over 0.75 of 32 GB/s."""
    device = find_device("910b2")
    assert device is not None
    found = counted_time(record(0), [ALL_REDUCE], Machine(device=device, num_devices=2))
    assert found == pytest.approx(
        {"compute": 4e9 / (0.58 * 376e12), "other_operators": 1e6 / (0.75 * 1800e9), "messages": 4000 / (0.75 * 32e9)}
    )


def test_a_long_timeline_is_thinned_without_losing_its_peak() -> None:
    points = tuple(MemoryPoint(operator=at, num_bytes=1, phase=0, held=(1, 0)) for at in range(5000))
    high = replace(points[1234], num_bytes=10**9, held=(10**9, 0))
    plot = memory_plot(record(0, timeline=(*points[:1234], high, *points[1235:])), limit=2e9)
    assert plot is not None
    (area,) = plot.figure.axes[0].collections
    heights = [y for _, y in area.get_paths()[0].vertices]
    assert max(heights) == pytest.approx(1.0)
    assert len(heights) <= 2 * MAX_POINTS + 4
