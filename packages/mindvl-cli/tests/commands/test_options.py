# SPDX-License-Identifier: Apache-2.0
"""Tests of the options that several commands take."""

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from mindvl_cli.commands.analyze import analyze
from mindvl_cli.commands.check import check
from mindvl_cli.commands.data import data
from mindvl_cli.commands.eval import evaluate
from mindvl_cli.commands.options import OUT_FILE, PLOT_FILE, answering_options, finite_or_none
from mindvl_cli.commands.plan import plan
from mindvl_cli.commands.report import report
from mindvl_cli.commands.search_resolution import search_resolution


def test_a_command_receives_the_shared_options_with_its_own_help(tmp_path):
    @click.command()
    @answering_options(benchmark="Riddle file", out="answers")
    def answer(**given):
        click.echo(sorted(given))

    assert "Riddle file, or a directory of such files" in CliRunner().invoke(answer, ["--help"]).output
    given = CliRunner().invoke(answer, ["-b", str(tmp_path)]).output
    names = ["as_json", "batch_size", "compat", "device", "kind", "max_new_tokens", "out", "paths", "trust_remote_code"]
    assert given.strip() == str(names)


def test_eval_and_search_take_them_with_equal_defaults():
    shared = ("paths", "out", "device", "batch_size", "max_new_tokens", "as_json")
    first, second = ({p.name: p for p in command.params} for command in (evaluate, search_resolution))
    for name in shared:
        assert (first[name].opts, first[name].default) == (second[name].opts, second[name].default)


def test_a_file_needs_an_existing_directory(tmp_path: Path) -> None:
    command = click.Command("write", params=[click.Option(["--out"], type=OUT_FILE)], callback=lambda out: None)
    good, bad = (CliRunner().invoke(command, ["--out", str(path)]) for path in (tmp_path / "a", tmp_path / "b" / "a"))
    assert good.exit_code == 0
    assert bad.exit_code == 2
    assert f"directory {tmp_path / 'b'} does not exist. Create it first." in bad.output


@pytest.mark.parametrize(
    "command",
    [
        *(plan, report, check.commands["alignment"], check.commands["parity"], analyze.commands["routing"]),
        *(data.commands["show"], data.commands["stats"]),
    ],
    ids=lambda command: command.name,
)
def test_commands_that_write_one_file_ask_for_its_directory_first(command: click.Command) -> None:
    assert {option.name: option.type for option in command.params}["out"] in (OUT_FILE, PLOT_FILE)


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_numbers_that_are_not_finite_are_refused(value: str) -> None:
    done = CliRunner().invoke(plan, ["--device", "910b2", "--memory-gb", value])
    assert done.exit_code == 2
    assert f"must be a finite number, got {value}." in done.output


def test_numbers_that_json_does_not_have_become_none():
    values = (1.5, float("nan"), float("-inf"), 3, "nan")
    assert [finite_or_none(value) for value in values] == [1.5, None, None, 3, "nan"]
