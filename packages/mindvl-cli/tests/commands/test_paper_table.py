# SPDX-License-Identifier: Apache-2.0
"""`mindvl paper-table` shows runs beside the paper's figures."""

import json

import pytest
from click.testing import CliRunner

from mindvl_cli.commands.paper_table import paper_table


@pytest.fixture
def runs(tmp_path):
    for name, score in (("a", 85.0), ("b", 70.0)):
        (tmp_path / name).mkdir()
        report = {"model": f"models/{name}", "compat": "strict", "metrics": {"MME": {"overall": score}}}
        (tmp_path / name / "report.json").write_text(json.dumps(report))
    return tmp_path


def _lines(*arguments):
    result = CliRunner().invoke(paper_table, [str(one) for one in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return {
        cells[0].strip(): [cell.strip() for cell in cells[1:]]
        for cells in (line.split("\u2502")[1:-1] for line in result.output.splitlines())
        if cells
    }, result.output


def test_a_run_with_the_name_of_a_row_stands_below_it_with_the_difference(runs):
    rows, output = _lines("6", f"MindVL-8B-2K={runs / 'a'}", runs / "b")
    assert rows["MindVL-8B-2K (paper)"][0] == "81.6"
    assert rows["MindVL-8B-2K (run)"] == ["85.0", "-", "-", "-", "-", "-", "-"]
    assert rows["difference"][0] == "+3.4"
    assert rows["b (run)"][0] == "70.0"
    assert "arXiv 2509.11662" in output
    assert "b: MME; rules of strict" in output


def test_json_and_wrong_directories(runs):
    result = CliRunner().invoke(paper_table, ["2", str(runs / "a"), "--json"], catch_exceptions=False)
    assert json.loads(result.stdout)["runs"] == {"a": [85.0, None, None, None, None, None, None]}
    twice = CliRunner().invoke(paper_table, ["2", str(runs / "a"), str(runs / "a")])
    assert (twice.exit_code, "two runs have the name 'a'" in twice.output) == (2, True)
    missing = CliRunner().invoke(paper_table, ["2", str(runs)])
    assert (missing.exit_code, "cannot be read as a report" in missing.output) == (2, True)
