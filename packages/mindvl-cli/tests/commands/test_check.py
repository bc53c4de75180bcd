# SPDX-License-Identifier: Apache-2.0
"""`mindvl check ops`: one line for each operator, JSON for machines, and an exit code that tells a wrong twin."""

import json

import pytest
from click.testing import CliRunner

from mindvl_cli.commands.check import check
from mindvl_ops import OpsError, backend_table, registry


def test_the_table_names_every_operator_once() -> None:
    result = CliRunner().invoke(check, ["ops", "--quick"], catch_exceptions=False)

    assert result.exit_code == 0
    assert [line.split()[:2] for line in result.stdout.splitlines()[1:]] == [
        [operator, "torch"] for operator in registry.operators()
    ]


def test_the_json_holds_errors_and_reasons_and_leaves_the_choice_as_it_was() -> None:
    before = backend_table()
    result = CliRunner().invoke(check, ["ops", "--quick", "--json", "--backend", "reference"], catch_exceptions=False)
    report = json.loads(result.stdout)

    assert (report["ok"], report["backend"], report["device"]) == (True, "reference", "cpu")
    rows = {row["operator"]: row for row in report["operators"]}
    assert rows["swiglu"]["chosen"] == "reference"
    assert rows["swiglu"]["why_not"]["torch"] == "configuration asks for reference"
    assert 0 < rows["swiglu"]["comparisons"]["bfloat16"]["forward"] < 0.03
    assert rows["adamw"]["comparisons"]["float32"]["backward"] is None
    assert backend_table() == before


def test_a_twin_that_is_too_far_off_or_fails_ends_with_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise RuntimeError("no such kernel")

    right = registry.lookup("swiglu", "torch")
    monkeypatch.setitem(registry._ENTRIES["swiglu"], "torch", lambda x: 1.1 * right(x))
    monkeypatch.setitem(registry._ENTRIES["rms_norm"], "torch", failing)
    result = CliRunner().invoke(check, ["ops", "--quick", "--json"])
    rows = {row["operator"]: row for row in json.loads(result.stdout)["operators"]}

    assert result.exit_code == 1
    assert sorted(name for name, row in rows.items() if not row["holds"]) == ["rms_norm", "swiglu"]
    assert rows["rms_norm"]["comparisons"]["float32"]["reason"] == "RuntimeError: no such kernel"
    assert rows["rms_norm"]["comparisons"]["float32"]["forward"] is None


def test_a_backend_that_is_not_there_is_our_error() -> None:
    with pytest.raises(OpsError, match="npu"):
        CliRunner().invoke(check, ["ops", "--backend", "npu"], catch_exceptions=False)
