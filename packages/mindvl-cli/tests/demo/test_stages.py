# SPDX-License-Identifier: Apache-2.0
"""Tests of the records that let a demo continue where it stopped."""

from pathlib import Path
from typing import Any

import pytest

from mindvl_cli.demo.stages import StageBook, fingerprint_of, start_over
from mindvl_cli.failures import CliError


def test_a_finished_stage_does_not_run_again_and_gives_what_it_recorded(tmp_path: Path) -> None:
    runs: list[int] = []

    def action() -> dict[str, Any]:
        runs.append(1)
        return {"loss": 0.5}

    assert StageBook(tmp_path, "a").run("warmup", action) == {"loss": 0.5}
    later = StageBook(tmp_path, "a")
    assert later.run("warmup", action) == {"loss": 0.5}
    assert len(runs) == 1
    assert later.seconds["warmup"] >= 0


def test_a_stage_that_was_cut_off_runs_again(tmp_path: Path) -> None:
    def cut_off() -> dict[str, Any]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        StageBook(tmp_path, "a").run("warmup", cut_off)

    assert StageBook(tmp_path, "a").run("warmup", lambda: {"done": True}) == {"done": True}


def test_records_of_other_settings_are_refused_with_the_way_out(tmp_path: Path) -> None:
    StageBook(tmp_path, fingerprint_of(("full", 0)))

    with pytest.raises(CliError, match="--fresh"):
        StageBook(tmp_path, fingerprint_of(("full", 1)))


def test_a_command_gives_its_document_and_is_written_down_as_a_user_would_type_it(tmp_path: Path) -> None:
    book = StageBook(tmp_path, "a")

    result = book.run("look", lambda: {"machine": book.command("doctor")})

    assert result["machine"]
    assert StageBook(tmp_path, "a").run("look", dict) == result
    assert book.commands["look"] == ["mindvl doctor"]


def test_starting_over_removes_a_demo_and_nothing_else(tmp_path: Path) -> None:
    demo, other = tmp_path / "demo", tmp_path / "other"
    StageBook(demo, "a")
    other.mkdir()
    (other / "thesis.txt").write_text("three years")

    start_over(demo)
    start_over(tmp_path / "never-made")

    assert not demo.exists()
    with pytest.raises(CliError, match="something else than a demo"):
        start_over(other)
    assert (other / "thesis.txt").is_file()
