# SPDX-License-Identifier: Apache-2.0
"""Tests of the demo's report: what stands in the page and in the JSON, and what depends on the clock."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from mindvl_cli.demo.report import QUICK_NOTICE, write_report
from mindvl_cli.demo.results import Results

pytestmark = pytest.mark.slow

VOID_TAGS = {"meta", "img"}


class _Balance(HTMLParser):
    """Collects tags that are closed in the wrong order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID_TAGS:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID_TAGS and (not self.open or self.open.pop() != tag):
            self.wrong.append(tag)


def test_the_page_needs_nothing_from_outside(results: Results, tmp_path: Path) -> None:
    page = write_report(results, tmp_path / "out").read_text(encoding="utf-8")

    sources = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert sources
    assert all(source.startswith(("data:image/", "#")) for source in sources)  # # names a mark of the same plot
    assert "<script" not in page
    assert "@import" not in page
    assert "url(" not in page


def test_every_tag_of_the_page_is_closed(results: Results, tmp_path: Path) -> None:
    checker = _Balance()
    checker.feed(write_report(results, tmp_path / "out").read_text(encoding="utf-8"))

    assert checker.wrong == []
    assert checker.open == []


def test_the_page_shows_every_stage_task_model_and_example(results: Results, tmp_path: Path) -> None:
    page = write_report(results, tmp_path / "out").read_text(encoding="utf-8")

    for stage in results.stages:
        assert stage.title in page
    for task in results.table.tasks:
        assert task.title in page
    for row in results.table.rows:
        assert row.model in page
    for example in results.examples:
        assert example.question in page
    assert page.count("data:image/png;base64,") == sum(len(example.images) for example in results.examples)


def test_text_from_a_model_cannot_become_markup(results: Results, tmp_path: Path) -> None:
    hostile = replace(results.examples[0], answer="<script>alert(1)</script>", is_right=False)
    page = write_report(replace(results, examples=(hostile,)), tmp_path / "out").read_text(encoding="utf-8")

    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_a_quick_run_says_first_that_it_claims_nothing(results: Results, tmp_path: Path) -> None:
    page = write_report(replace(results, is_quick=True), tmp_path / "out").read_text(encoding="utf-8")
    document = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))

    body = page[page.index("<body>") :]
    assert body.index(QUICK_NOTICE) < body.index("<h1>")
    assert next(iter(document)) == "notice"
    assert document["notice"] == QUICK_NOTICE


def test_clock_and_machine_change_nothing_outside_their_own_keys(results: Results, tmp_path: Path) -> None:
    slower = replace(results.timing, stages=tuple(replace(s, seconds=s.seconds * 3) for s in results.timing.stages))
    write_report(results, tmp_path / "a")
    write_report(
        replace(results, timing=slower, machine=replace(results.machine, num_cores=64, finished_at="later")),
        tmp_path / "b",
    )

    first, second = (json.loads((tmp_path / run / "report.json").read_text(encoding="utf-8")) for run in "ab")
    assert first["timing"] != second["timing"]
    for document in (first, second):
        del document["timing"], document["machine"]
    assert first == second


def test_the_json_holds_the_overall_score_as_the_mean_over_tasks(results: Results, tmp_path: Path) -> None:
    write_report(results, tmp_path / "out")
    document = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))

    assert document["table"]["rows"][0]["overall"] == (0.905 + 0.97 + 0.9 + 0.82 + 0.94) / 5


def test_images_are_named_relative_to_the_report(results: Results, tmp_path: Path) -> None:
    write_report(results, tmp_path)
    document = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))

    assert document["examples"][0]["images"] == ["images/0-0.png"]


def test_a_run_without_curves_packing_or_examples_still_gives_a_page(results: Results, tmp_path: Path) -> None:
    stages = tuple(replace(stage, curve=(), packing=None) for stage in results.stages)
    page = write_report(replace(results, stages=stages, examples=()), tmp_path / "out").read_text(encoding="utf-8")

    assert "Scores on the test split" in page
    assert "Packing and speed" not in page


def test_a_stages_recipe_is_folded_below_its_command_and_kept_in_the_json(results: Results, tmp_path: Path) -> None:
    recipe = "phase: sft\nout: <here>\n"
    stages = tuple(replace(s, recipe=recipe) if s.name == "sft-192" else s for s in results.stages)
    page = write_report(replace(results, stages=stages), tmp_path / "out").read_text(encoding="utf-8")
    document = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))

    folded = "<details><summary>Recipe of SFT, 192 tokens</summary><pre>phase: sft\nout: &lt;here&gt;\n</pre></details>"
    assert page.count("<details>") == 1
    assert f"mindvl train recipes/sft-192.yaml</pre>{folded}<pre>mindvl train recipes/sft-256.yaml" in page
    assert [stage["recipe"] for stage in document["stages"] if stage["name"] == "sft-192"] == [recipe]
