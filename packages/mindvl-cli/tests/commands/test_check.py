# SPDX-License-Identifier: Apache-2.0
"""`mindvl check`: one line for each operator or kind of input, JSON for machines, an exit code that tells a fault."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from mindvl_cli.commands.check import check
from mindvl_model import WeightError
from mindvl_model.testing.tiny import save_qwen2_5_vl, smallest_qwen2_5_vl
from mindvl_ops import OpsConfig, OpsError, backend_table, registry, select_backends


@pytest.fixture(autouse=True)
def operators_chosen_anew() -> Iterator[None]:
    """A test that replaced an operator leaves it chosen."""
    yield
    select_backends(OpsConfig(backend="torch"))


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


def test_an_implementation_that_is_too_far_off_or_fails_ends_with_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "qwen"
    save_qwen2_5_vl(smallest_qwen2_5_vl(), path)
    return path


def test_parity_shows_every_kind_and_writes_every_input(directory: Path, tmp_path: Path) -> None:
    out = tmp_path / "parity.csv"
    arguments = ["parity", str(directory), "--inputs", "10", "--out", str(out), "--one-at-a-time"]
    result = CliRunner().invoke(check, arguments, catch_exceptions=False)

    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines()]
    assert [line[:2] for line in lines[1:]] == [
        ["text", "2"], ["image", "2"], ["images", "2"], ["video", "2"], ["mixed", "2"], ["all", "10"],
    ]  # fmt: skip
    assert float(lines[-1][3]) < 1e-5
    rows = list(csv.DictReader(out.open(newline="")))
    assert [int(row["number"]) for row in rows] == list(range(10))
    assert max(float(row["mre"]) for row in rows) == pytest.approx(float(lines[-1][3]), rel=0.01)
    assert {row["holds"] for row in rows} == {"True"}
    assert list(tmp_path.iterdir()) == [out]


def test_parity_names_what_is_beyond_the_bound_and_ends_with_code_1(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mindvl_model.hf import parity

    monkeypatch.setattr(parity, "BOUND", 1e-9)
    result = CliRunner().invoke(check, ["parity", str(directory), "--inputs", "4", "--seed", "8"])
    assert result.exit_code == 1
    assert "above the bound: input 3 of seed 8 (video, " in result.stdout

    result = CliRunner().invoke(check, ["parity", str(directory), "--inputs", "4", "--json"])
    report = json.loads(result.stdout)
    assert (result.exit_code, report["ok"], report["model_type"]) == (1, False, "qwen2_5_vl")
    assert [one["number"] for one in report["failing"]] == [0, 1, 2, 3]
    assert report["worst"]["all"]["inputs"] == 4
    assert 0 < report["worst"]["all"]["mre"] < 1e-5


def test_parity_of_a_directory_that_is_none_is_our_error(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match=r"config.json: does not exist"):
        CliRunner().invoke(check, ["parity", str(tmp_path)], catch_exceptions=False)
    result = CliRunner().invoke(check, ["parity", str(tmp_path), "--out", str(tmp_path / "no" / "table.csv")])
    assert result.exit_code == 2
