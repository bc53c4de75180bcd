# SPDX-License-Identifier: Apache-2.0
"""Tests of the options that several commands take."""

import click
from click.testing import CliRunner

from mindvl_cli.commands.eval import evaluate
from mindvl_cli.commands.options import answering_options
from mindvl_cli.commands.search_resolution import search_resolution


def test_a_command_receives_the_shared_options_and_says_what_they_mean_for_it(tmp_path):
    @click.command()
    @answering_options(benchmark="A riddle file", out="answers")
    def answer(**given):
        click.echo(sorted(given))

    assert "A riddle file, or a folder of them" in CliRunner().invoke(answer, ["--help"]).output
    given = CliRunner().invoke(answer, ["-b", str(tmp_path)]).output
    assert given.strip() == "['as_json', 'batch_size', 'device', 'max_new_tokens', 'out', 'paths']"


def test_eval_and_search_take_them_with_equal_defaults():
    shared = ("paths", "out", "device", "batch_size", "max_new_tokens", "as_json")
    first, second = ({p.name: p for p in command.params} for command in (evaluate, search_resolution))
    for name in shared:
        assert (first[name].opts, first[name].default) == (second[name].opts, second[name].default)
