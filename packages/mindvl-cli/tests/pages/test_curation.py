# SPDX-License-Identifier: Apache-2.0
"""Tests of mindvl_cli.pages.curation."""

from pathlib import Path
from typing import Any

from mindvl_cli.pages.curation import write_curation_page
from mindvl_data.curation.engine.tally import count_values, new_tally


def page(tmp_path: Path, *, text: str = "short") -> str:
    tally = new_tally(1)
    tally |= {"read": 100, "written": 60, "quarantined": 1}
    tally["steps"][0] |= {"in": 99, "out": 60, "dropped": {"too_short": 39}}
    count_values(tally["steps"][0]["facts"], "length", list(range(99)))
    count_values(tally["steps"][0]["facts"], "language", ["en"] * 70 + ["fr"] * 29)
    count_values(tally["facts"], "length", list(range(39, 99)))
    count_values(tally["facts"], "language", ["en"] * 60)
    tally["points"] = [[1, -2.0, 0.0, "3"], [2, 2.0, 1.0, "12"]]
    example = {"rank": 1, "id": "in/a.jsonl:3", "step": "rules", "facts": {"length": 3}, "text": text, "image": None}
    tally["examples"] = {
        "0 too_short": [{**example, "reason": "too_short", "value": 3.14159}],
        "kept": [{**example, "image": "AAAA"}],
        "group 0:0": [{**example, "id": "first"}, {**example, "id": "second", "reason": "duplicate", "value": None}],
    }
    step = {"step": "rules", **tally["steps"][0], "quarantined": {"ValueError: x": 1}}
    manifest: dict[str, Any] = {
        "name": "texts", "seed": 0, "sample": 200, "steps": [step],
        "inputs": [{"path": "in", "format": "jsonl", "files": 1, "num_bytes": 10}],
    }  # fmt: skip
    write_curation_page(tmp_path / "report.html", tally, manifest)
    return (tmp_path / "report.html").read_text(encoding="utf-8")


def test_the_funnel_shows_each_step_with_its_share_and_reasons(tmp_path: Path) -> None:
    found = page(tmp_path)
    assert (
        '<b>rules</b><div><i style="width:60.0%"></i></div><span>60</span><small>39 too short, 1 quarantined' in found
    )
    assert "A sample of 200 records" in found


def test_facts_are_drawn_before_and_after(tmp_path: Path) -> None:
    found = page(tmp_path)
    assert 'aria-label="Histogram of length before and after"' in found
    assert "median 49 to 68" in found  # of 0..98 and of 39..98, rounded to 7 bits
    assert "<span>60 of 70</span>" in found
    assert "<span>0 of 29</span>" in found


def test_dropped_and_kept_records_are_shown_with_reason_and_value(tmp_path: Path) -> None:
    found = page(tmp_path)
    assert '<span>too short</span><em class="wrong">3.142</em>' in found
    assert 'src="data:image/jpeg;base64,AAAA"' in found
    assert found.index(">first<") < found.index(">second<")
    assert "ValueError: x" in found


def test_clusters_are_drawn_as_a_map(tmp_path: Path) -> None:
    found = page(tmp_path)
    assert '<circle class="tone-1" cx="0.0" cy="0.0" r="4"><title>cluster 3</title>' in found
    assert '<circle class="tone-0" cx="1000.0" cy="500.0" r="4"><title>cluster 12</title>' in found


def test_texts_of_records_are_escaped(tmp_path: Path) -> None:
    found = page(tmp_path, text="<script>alert(1)</script>")
    assert "<script>" not in found
    assert "&lt;script&gt;" in found


def test_a_name_that_is_not_unicode_is_shown_with_question_marks(tmp_path: Path) -> None:
    assert "caf?.png" in page(tmp_path, text="caf\udce9.png")
