# SPDX-License-Identifier: Apache-2.0
"""The `mindvl` command: the name and purpose of every command; a command is imported only when it is called.

Comes first; commands/ come after it. Nothing but click is imported here, so that help is printed at once.
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
    "demo": (
        "mindvl_cli.commands.demo:demo",
        "Run the whole pipeline on real handwriting in minutes, and write a report.",
    ),
    "init": ("mindvl_cli.commands.init:init", "Write a commented recipe from data and a model directory."),
    "data": ("mindvl_cli.commands.data:data", "Write, curate, index, inspect and count training data."),
    "recipe": (
        "mindvl_cli.commands.recipe:recipe",
        "Show and audit the paper's data mixtures, and map them to shards.",
    ),
    "plan": ("mindvl_cli.commands.plan:plan", "Estimate memory and step time for each parallel layout of a model."),
    "rehearse": (
        "mindvl_cli.commands.rehearse:rehearse",
        "Run one training step at full size without its devices: memory, messages, operators.",
    ),
    "train": ("mindvl_cli.commands.train:train", "Train from a recipe or a pipeline file, or resume its training."),
    "report": ("mindvl_cli.commands.report:report", "Summarize a run: loss curves, step time by part, configuration."),
    "convert": (
        "mindvl_cli.commands.convert:convert",
        "Convert a checkpoint to a transformers directory, or the reverse.",
    ),
    "merge": ("mindvl_cli.commands.merge:merge", "Merge the weights of several models."),
    "eval": ("mindvl_cli.commands.eval:evaluate", "Score an exported model on benchmarks."),
    "search-resolution": (
        "mindvl_cli.commands.search_resolution:search_resolution",
        "Find the image size limits at which a model scores best.",
    ),
    "chat": ("mindvl_cli.commands.chat:chat", "Talk to a model in the terminal: text and images."),
    "serve": ("mindvl_cli.commands.serve:serve", "Start an inference server for a model."),
    "paper-table": (
        "mindvl_cli.commands.paper_table:paper_table",
        "Show a table of the paper with the scores of evaluated models.",
    ),
    "analyze": ("mindvl_cli.commands.analyze:analyze", "Measure the expert routing of a trained model."),
    "bench": (
        "mindvl_cli.commands.bench:bench",
        "Measure packing, loading, operators or training steps on this machine.",
    ),
    "check": (
        "mindvl_cli.commands.check:check",
        "Compare operators, packing, parallel layouts and models with references.",
    ),
    "doctor": ("mindvl_cli.commands.doctor:doctor", "Check this machine and recommend changes."),
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
    epilog="""Each command has --help with an example. Start with: mindvl demo --quick

\b
Exit codes:
    0  success
    1  reported error
    2  wrong usage
   65  a training run used up its data
   75  stopped by a signal; run the same command again to resume
   79  a training process made no progress
  130  interrupted""",
)
@click.option("-v", "--verbose", is_flag=True, help="Log debug messages of the mindvl packages.")
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and exit.",
)
def cli(verbose: bool) -> None:
    """Train multimodal language models, from raw images to a merged and exported model.

    The paper: MindVL, arXiv 2509.11662.
    """
    set_up_logging(verbose=verbose)


def main() -> NoReturn:
    """The console entry point.

    Exit codes: 0 success, 1 a reported error, 2 wrong usage, 65 a training run used up its data, 75 stopped by a signal where the
    same command continues, 79 a training process made no progress, 130 interrupted, 143 and 138 ended by SIGTERM and
    SIGUSR1.
    """
    guarded: list[Any] = [
        Guarded(sys.stdout, hides_secrets=False, may_draw=False),
        Guarded(sys.stderr, hides_secrets=True, may_draw=True),
    ]
    sys.stdout, sys.stderr = guarded
    with ended_by_signals():
        code = run_guarded(lambda: cli.main(prog_name="mindvl", standalone_mode=False))
    if code >= STOPPED:
        # Do not wait for worker threads that still run, as Python would at exit.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
