# SPDX-License-Identifier: Apache-2.0
"""The verdict: memory, messages and operators each refuse a job with their reason."""

from dataclasses import replace

import pytest

from mindvl_train.rehearsal.classes import RankClass
from mindvl_train.rehearsal.record import MissingOperator, Peak, PhaseRecord
from mindvl_train.rehearsal.verdict import judge, peak_bytes

CLASSES = [RankClass(ranks=(0, 1), pp_rank=0, content="stage 0"), RankClass(ranks=(2, 3), pp_rank=1, content="stage 1")]


def with_peak(record, gigabytes):
    peak = Peak(num_bytes=int(gigabytes * 1e9), operator=0, operator_name="aten::mm", phase=0, source="", categories={})
    return replace(record, peak=peak)


@pytest.fixture
def records(world, collective):
    """Ranks 0, 1 and 2 with one all-reduce over all, and peaks of 10, 10 and 40 GB."""
    made = world({rank: [collective("all_reduce", "all")] for rank in (0, 1, 2)}, {"all": [0, 1, 2, 3]}).records
    return [with_peak(made[rank], size) for rank, size in ((0, 10), (1, 10), (2, 40))]


def test_a_job_that_fits_has_its_tightest_rank_and_margin(records):
    """64 GB: 0.94 of it is usable, and 3 GB of that are the context of an NPU: 60.16 - 3 - 40."""
    found = judge(records, CLASSES, memory_bytes=64e9, kind="npu")
    assert found.is_ok
    assert (found.tightest, found.margin_bytes) == (2, pytest.approx(17.16e9))
    assert found.sentence == (
        "fits: rank 2 needs the most memory, 43.0 GB of 60.2 GB usable, 17.2 GB free; the 3 messages of 3 rehearsed ranks "
        "match without a deadlock."
    )


def test_a_job_that_does_not_fit_has_its_reason(records):
    found = judge(records, CLASSES, memory_bytes=32e9, kind="npu")
    assert not found.is_ok
    assert found.sentence.startswith(
        "does not fit: rank 2 needs the most memory, 43.0 GB of 30.1 GB usable, 12.9 GB too much"
    )
    assert found.reasons == (
        "rank 2 needs 40.00 GB for tensors and 3.0 GB for the device context, but 30.1 GB are usable.",
    )


def test_messages_that_differ_refuse_a_job_that_fits(records):
    records[1] = replace(records[1], messages=())
    found = judge(records, CLASSES, memory_bytes=64e9, kind="npu")
    assert found.fits
    assert not found.is_ok
    assert "its messages would make it hang" in found.sentence
    assert all("would hang or fail: all of ranks 0, 1, 2, 3" in reason for reason in found.reasons)


def test_a_missing_operator_refuses_a_job_and_names_its_line(records):
    records[0] = replace(records[0], missing={"aten::xlogy": MissingOperator(source="mindvl_model/a.py:3", count=2)})
    found = judge(records, CLASSES, memory_bytes=64e9, kind="npu")
    assert found.reasons == ("aten::xlogy: the device library has no such operator; used at mindvl_model/a.py:3.",)


def test_the_peak_is_that_of_the_whole_rehearsal(records):
    start = PhaseRecord(
        name="build", step=-1, first_operator=0, num_operators=1, flops=0.0, bytes_read=0.0, bytes_written=0.0,
        peak_bytes=int(50e9), end_bytes=0, wall_s=0.0,
    )  # fmt: skip
    assert peak_bytes(replace(records[2], phases=(start,))) == 50e9


def test_ranks_of_a_class_that_differ_are_named(records):
    records[1] = with_peak(records[1], 10.25)
    found = judge(records, CLASSES, memory_bytes=64e9, kind="npu")
    assert found.unequal == ("rank 1 differs from rank 0 of its class: its peak is 250.00 MB higher",)
