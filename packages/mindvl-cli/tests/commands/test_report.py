# SPDX-License-Identifier: Apache-2.0
"""Tests of `mindvl report`: a table, a page, JSON."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mindvl_cli.commands.report import report
from mindvl_cli.failures import CliError
from mindvl_cli.run_figures import SPLIT_PARTS, gain

LINE: dict[str, Any] = {
    "step": 10,
    "loss": 1.25,
    "learning_rate": 1e-3,
    "grad_norm": 1.0,
    "loss_tokens": 100,
    "tokens": 1000,
    "tokens_per_s": 500.0,
    "seconds_per_step": 0.2,
    "loss_by_source": {"pages": 1.5},
    "tflops_per_device": 0.02,
    "step_split": dict.fromkeys(SPLIT_PARTS, 0.1),
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "metrics.jsonl").write_text(json.dumps(LINE) + "\n")
    return tmp_path


def test_the_table_names_every_part_of_a_step(run: Path) -> None:
    result = CliRunner().invoke(report, [str(run)], catch_exceptions=False)
    assert result.exit_code == 0
    assert "unfinished, step 10, loss 1.2500" in result.output
    assert "loss by source: pages 1.5000" in result.output
    for part in SPLIT_PARTS:
        assert part.replace("_", " ") in result.output


def test_json_is_one_document_and_the_page_stands_where_it_was_asked_for(run: Path) -> None:
    page = run / "report.html"
    result = CliRunner().invoke(report, [str(run), "--json", "--out", str(page)], catch_exceptions=False)
    figures = json.loads(result.output)
    assert figures["loss"] == 1.25
    assert set(figures["step_split"]) == set(SPLIT_PARTS)
    assert page.read_text().startswith("<!doctype html>")
    assert {path.name for path in run.iterdir()} == {"metrics.jsonl", "report.html"}


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CliError, match=r"no metrics\.jsonl"):
        CliRunner().invoke(report, [str(tmp_path)], catch_exceptions=False)


def test_of_the_work_itself_no_gain_is_reported() -> None:
    part = {"seconds": 1.0, "share": 0.5, "gain_if_zero": 1.0}
    assert gain("language", part) == ""
    assert gain("data_wait", part) == "+100.0 %"
