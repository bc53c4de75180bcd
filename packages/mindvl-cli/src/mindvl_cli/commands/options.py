# SPDX-License-Identifier: Apache-2.0
"""Options that several commands take, said once.

Used by the commands that write one file, and by those that let a model answer benchmarks: eval.py and
search_resolution.py.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from mindvl_cli.extras import require

F = TypeVar("F", bound=Callable[..., Any])


class _OutFile(click.Path):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(str(super().convert(value, param, ctx)))
        if not path.parent.is_dir():
            self.fail(f"there is no directory {path.parent}. Make it first.", param, ctx)
        return path


class _PlotFile(_OutFile):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        require("plots", f"{ctx.command_path if ctx else 'mindvl'} --out")
        return super().convert(value, param, ctx)


# A file to write. Its directory must be there when the command starts: hours of work must not end for want of it.
OUT_FILE = _OutFile(dir_okay=False)
PLOT_FILE = _PlotFile(dir_okay=False)  # one that needs the extra "plots"


TRUST_REMOTE_CODE = click.option(
    "--trust-remote-code", is_flag=True,
    help="Run the Python files that the model directory carries, with all your rights; MindVL directories need it.",
)  # fmt: skip


def answering_options(*, benchmark: str, out: str) -> Callable[[F], F]:
    """Add what says which items are answered, how, and where that is kept.

    The command receives `paths`, `out`, `device`, `batch_size`, `max_new_tokens`, `trust_remote_code` and
    `as_json`.

    Args:
        benchmark: What one file is, for the help, such as "A JSONL file".
        out: What the directory will hold, for the help.
    """
    options = (
        click.option(
            "-b",
            "--benchmark",
            "paths",
            type=click.Path(exists=True, path_type=Path),
            multiple=True,
            required=True,
            help=f"{benchmark}, or a directory of them; may be given several times.",
        ),
        click.option("--out", type=click.Path(file_okay=False, path_type=Path), help=f"Directory for {out}."),
        click.option("--device", default="auto", show_default=True, help="Where the model runs, such as cpu or cuda."),
        click.option(
            "--batch-size", type=click.IntRange(min=1), default=64, show_default=True, help="Items answered at once."
        ),
        click.option(
            "--max-new-tokens", type=click.IntRange(min=1), default=64, show_default=True, help="Longest answer."
        ),
        TRUST_REMOTE_CODE,
        click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout."),
    )

    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate
