# SPDX-License-Identifier: Apache-2.0
"""The `mindvl` command: knows the name and purpose of every command, and imports one only when it is called.

Comes first; commands/ come after it. Nothing but click is imported here, so that help answers at once.
"""

import importlib
import os
import sys
from typing import Any, NoReturn

import click

from mindvl_cli.failures import run_guarded
from mindvl_cli.interrupts import STOPPED, StoppableGroup, ended_by_signals
from mindvl_cli.logs import set_up_logging
from mindvl_cli.output import Guarded

COMMANDS = {
    # name: (module:attribute, line in the help), in the order in which a user meets them
    "demo": ("mindvl_cli.commands.demo:demo", "The whole way once on real handwriting, in minutes, with a report."),
    "data": ("mindvl_cli.commands.data:data", "Write, index, show and count training data."),
    "recipe": ("mindvl_cli.commands.recipe:recipe", "The paper's data recipes: shares, an audit, a map to shards."),
    "plan": ("mindvl_cli.commands.plan:plan", "Which layouts of a model fit a cluster, how fast, for how long."),
    "train": ("mindvl_cli.commands.train:train", "Train from a recipe or a plan of several; go on where it stopped."),
    "report": ("mindvl_cli.commands.report:report", "How a run went: curves, where its time went, its card."),
    "convert": (
        "mindvl_cli.commands.convert:convert",
        "A checkpoint to a directory that transformers loads, and back.",
    ),
    "merge": ("mindvl_cli.commands.merge:merge", "Average the weights of several models."),
    "eval": ("mindvl_cli.commands.eval:evaluate", "Score an exported model on a benchmark."),
    "search-resolution": (
        "mindvl_cli.commands.search_resolution:search_resolution",
        "Find the image size limits at which a model scores best.",
    ),
    "analyze": ("mindvl_cli.commands.analyze:analyze", "Measure what a model does inside: routing of its experts."),
    "bench": ("mindvl_cli.commands.bench:bench", "Measure packing, loading, operators or steps on this machine."),
    "check": ("mindvl_cli.commands.check:check", "Compare operators, packing, layouts and models with references."),
    "doctor": ("mindvl_cli.commands.doctor:doctor", "Check this machine: what to change, and why."),
}


class LazyGroup(StoppableGroup):
    """A group whose commands are `module:attribute` strings until they are called."""

    def __init__(self, *args: Any, lazy_commands: dict[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lazy_commands = lazy_commands

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of the table, which is the order of the work."""
        return list(self.lazy_commands)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of one command; None for an unknown name, which click reports."""
        if cmd_name not in self.lazy_commands:
            return None
        module, attribute = self.lazy_commands[cmd_name][0].split(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command), f"{module}:{attribute} is not a click command"
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands from the table, without importing any of them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self.lazy_commands.items()])


def _print_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        click.echo(f"mindvl {version('mindvl-cli')}")
        ctx.exit()


@click.group(
    cls=LazyGroup,
    lazy_commands=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Each command has --help with an example. Start with: mindvl demo --quick",
)
@click.option("-v", "--verbose", is_flag=True, help="Also log what is only of interest when looking for a fault.")
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Version.")
def cli(verbose: bool) -> None:
    """From raw images to a merged, searched, exported multimodal model."""
    set_up_logging(verbose=verbose)


def main() -> NoReturn:
    """The console entry point.

    Exit codes: 0 done, 1 our error, 2 wrong usage, 65 a training used up its data, 75 asked to stop where the same
    command continues, 79 a process of a training was stuck, 130 interrupted, 143 and 138 ended by SIGTERM and SIGUSR1.
    """
    guarded: list[Any] = [
        Guarded(sys.stdout, hides_secrets=False, may_draw=False),
        Guarded(sys.stderr, hides_secrets=True, may_draw=True),
    ]
    sys.stdout, sys.stderr = guarded
    with ended_by_signals():
        code = run_guarded(lambda: cli.main(prog_name="mindvl", standalone_mode=False))
    if code >= STOPPED:
        # Asked to end: threads of a pool that still work, which Python would wait for, must not hold it up.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
