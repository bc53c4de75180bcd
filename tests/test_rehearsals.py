# SPDX-License-Identifier: Apache-2.0
"""The session `nox -s rehearse`: its jobs are the published training stages, and it judges and reports their results."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="module")
def session(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("rehearsals", root / "tests" / "rehearsals" / "published.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["rehearsals"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def document(peak_bytes: float, *reasons: str) -> dict[str, Any]:
    """A rehearsal with an estimate of 40 GB."""
    figures = {
        "rank": 0, "coordinates": {"pp_rank": 0}, "content": "stage 0 of 1: 36 layers",
        "peak_bytes": peak_bytes, "estimated_bytes": 40e9,
        "messages": [{"count": 5}, {"count": 7}], "waits": [{"count": 2}], "missing": {}, "wall_s": 12.3,
    }  # fmt: skip
    return {"commit": "1234567", "reasons": list(reasons), "ranks": [figures]}


def test_every_stage_of_the_published_recipes_is_a_job_on_every_number_of_devices(session: ModuleType) -> None:
    stages = ("warmup", "multitask", "sft-2048", "sft-4096", "sft-8192")
    wanted = {f"mindvl-8b {stage} on {count}" for stage in (*stages, "pretrain") for count in (16, 32, 64, 128)}
    wanted |= {f"mindvl-671b-a37b {stage} on {count}" for stage in stages for count in (512, 1024)}
    wanted |= {"qwen3-vl-4b sft on 64", "qwen3-vl-30b-a3b sft on 64"}
    assert {job.name for job in session.jobs()} == wanted
    assert sum("optimizer.offload=true" in job.arguments for job in session.jobs()) == 2


def test_the_tightest_rank_is_the_first_of_the_stage_with_the_highest_estimate(session: ModuleType) -> None:
    """Short packed sequences leave the first stage less than the last, which has the head."""
    found = {job.name: job for job in session.jobs()}
    assert found["mindvl-8b multitask on 128"].tightest_rank == 0
    assert found["mindvl-8b sft-2048 on 128"].tightest_rank == 64
    assert found["mindvl-8b sft-2048 on 128"].num_packs == 8  # 512 over 64 data-parallel ranks
    assert found["mindvl-671b-a37b warmup on 512"].num_packs == 16  # 1,024 over 64


def test_a_peak_more_than_3_percent_off_its_estimate_is_a_problem(session: ModuleType) -> None:
    assert session.problems(document(41.1e9)) == []
    assert "41.30 GB, but the layout search estimates 40.00 GB (+3.2%)" in session.problems(document(41.3e9))[0]
    assert "(-3.2%)" in session.problems(document(38.7e9))[0]


def test_only_the_highest_peak_of_a_stage_is_compared(session: ModuleType) -> None:
    both = document(40.1e9)
    both["ranks"] += document(36e9)["ranks"]  # a rank that encodes no image
    assert session.problems(both) == []
    both["ranks"][1]["coordinates"] = {"pp_rank": 1}
    assert len(session.problems(both)) == 1


def test_a_job_that_does_not_fit_or_fails_is_a_problem(session: ModuleType) -> None:
    assert session.problems(document(40e9, "rank 0 needs 70 GB")) == ["rank 0 needs 70 GB"]
    assert session.problems(None) == ["the rehearsal failed; its message is above."]


def test_a_row_has_the_figures_of_one_rank(session: ModuleType) -> None:
    job = session.Job("mindvl-8b sft-8192", 128, ())
    assert list(session.rows(job, document(41e9))) == [
        "| mindvl-8b sft-8192 | 128 | 1234567 | 0 (stage 0 of 1: 36 layers) | 41.00 GB | 40.00 GB | +2.50 % | 12 | 2 | none "
        "| 12 |"
    ]


def test_a_written_table_keeps_the_rows_of_jobs_without_a_new_result(session: ModuleType, tmp_path: Path) -> None:
    jobs = [session.Job(f"mindvl-8b {stage}", 1024, ()) for stage in ("warmup", "multitask", "sft-2048")]
    old = "| mindvl-8b multitask | 1,024 | abc | 0 |\n|  | |  | 16 |\n| mindvl-8b warmup | 1,024 | abc | 0 |\n"
    directory = tmp_path / jobs[0].directory(tightest=True)
    directory.mkdir()
    (directory / "rehearsal.json").write_text(json.dumps(document(41e9)))
    (directory / "commit").write_text("1234567")
    written = session.with_table(f"Before.\n\n{session.HEADER}\n|---|\n{old}\nAfter.\n", jobs, tmp_path)
    assert written.splitlines()[4:] == [
        *session.rows(jobs[0], document(41e9)),
        "| mindvl-8b multitask | 1,024 | abc | 0 |",
        "|  | |  | 16 |",
        "| mindvl-8b sft-2048 | 1,024 | not rehearsed | | | | | | | | |",
        "",
        "After.",
    ]


def test_the_page_names_every_job(session: ModuleType, root: Path) -> None:
    page = (root / "docs" / "design" / "evidence" / "rehearsal.md").read_text()
    assert [job.name for job in session.jobs() if f"| {job.stage} | {job.num_devices:,} |" not in page] == []
