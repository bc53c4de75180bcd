# SPDX-License-Identifier: Apache-2.0
"""Tests of the command group: help is light, every command loads, exit codes reach the shell."""

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from mindvl_cli.main import COMMANDS, cli

HEAVY = ("torch", "transformers", "numpy", "pydantic", "yaml", "rich", "megatron")


def test_help_imports_no_heavy_library() -> None:
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom mindvl_cli.main import cli\n"
        "result = CliRunner().invoke(cli, ['--help'])\nassert result.exit_code == 0, result.output\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], len(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    heavy, count = out.rsplit(maxsplit=1)
    assert heavy.strip() == "[]"
    assert int(count) < 400  # of which the interpreter and click bring about 250


def test_help_lists_every_command_in_order() -> None:
    output = CliRunner().invoke(cli, ["--help"]).output

    places = [output.index(f"\n  {name} ") for name in COMMANDS]
    assert places == sorted(places)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_loads_and_has_help_with_an_example(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    calls = [[name, part] for part in command.commands] if isinstance(command, click.Group) else [[name]]

    for call in calls:
        help_text = CliRunner().invoke(cli, [*call, "--help"], prog_name="mindvl").output
        _, _, below_usage = help_text.partition("\n")
        assert f"mindvl {' '.join(call)}" in below_usage, help_text


def test_the_shell_sees_our_exit_codes() -> None:
    def code(*arguments: str) -> int:
        return subprocess.run([sys.executable, "-m", "mindvl_cli.main", *arguments], capture_output=True).returncode

    assert code("--version") == 0
    assert code("no-such-command") == 2
