# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share.

Used by the commands that write one file, and by those that run a model on benchmarks: eval.py and
search_resolution.py.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from mindvl_cli.extras import require

F = TypeVar("F", bound=Callable[..., Any])


class _OutFile(click.Path):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(str(super().convert(value, param, ctx)))
        if not path.parent.is_dir():
            self.fail(f"directory {path.parent} does not exist. Create it first.", param, ctx)
        return path


class _PlotFile(_OutFile):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        require("plots", f"{ctx.command_path if ctx else 'mindvl'} --out")
        return super().convert(value, param, ctx)


class FiniteRange(click.FloatRange):
    """A range of finite numbers; click's own range accepts NaN, and infinity where a bound is open."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Refuse NaN and infinity."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"must be a finite number, got {number}.", param, ctx)
        return number


class BenchmarkPath(click.Path):
    """A file or a directory, or `lm-eval:` and the name of a task, which stays text."""

    def __init__(self) -> None:
        super().__init__(exists=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Leave tasks of lm-eval to lm-eval."""
        return value if str(value).startswith("lm-eval:") else super().convert(value, param, ctx)


class RenamedChoice(click.Choice[str]):
    """A choice that refuses a renamed value with its new name.

    Args:
        choices: Accepted values.
        renamed: Old value -> new value.
    """

    def __init__(self, choices: Sequence[str], renamed: Mapping[str, str]) -> None:
        super().__init__(choices)
        self.renamed = renamed

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Refuse an old value; click checks the others."""
        if value in self.renamed:
            self.fail(f"{value!r} was renamed. Use {self.renamed[value]!r}.", param, ctx)
        return super().convert(value, param, ctx)


# A file to write. Its directory must exist when the command starts: a long run must not fail at its end.
OUT_FILE = _OutFile(dir_okay=False)
PLOT_FILE = _PlotFile(dir_okay=False)  # one that needs the extra "plots"


AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")
RECIPE = click.argument("recipe", type=click.Path(exists=True, dir_okay=False, path_type=Path))
OVERRIDES = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
TRUST_REMOTE_CODE = click.option(
    "--trust-remote-code", is_flag=True,
    help="Run the Python files of the model directory with your user rights; MindVL models need it.",
)  # fmt: skip


def finite_or_none(value: Any) -> Any:
    """The value; None in place of NaN and infinity, which JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def count_option(*names: str, help: str, default: int | None = None, least: int = 1) -> Callable[[F], F]:
    """An option for a whole number of at least `least`; its default is shown."""
    return click.option(
        *names, type=click.IntRange(min=least), default=default, show_default=default is not None, help=help
    )


def answering_options(*, benchmark: str, out: str, has_tasks: bool = False) -> Callable[[F], F]:
    """Add the options for benchmarks, generation and the output directory.

    The command receives `paths`, `kind`, `compat`, `out`, `device`, `batch_size`, `max_new_tokens`, `trust_remote_code` and
    `as_json`.

    Args:
        benchmark: Kind of one benchmark file for the help text, such as "JSONL file".
        out: Content of the output directory for the help text.
        has_tasks: Whether `lm-eval:TASK` is accepted as a benchmark; such entries of `paths` are texts.
    """
    options = (
        click.option(
            "-b",
            "--benchmark",
            "paths",
            type=BenchmarkPath() if has_tasks else click.Path(exists=True, path_type=Path),
            multiple=True,
            required=True,
            help=f"{benchmark}, or a directory of such files{', or lm-eval:TASK' * has_tasks}; may be repeated. "
            "docs/guides/evaluate.md has the formats.",
        ),
        click.option(
            "--kind",
            help="Benchmark or metric of TSV and parquet files, such as mmbench; default: from file names and columns.",
        ),
        click.option(
            "--compat",
            type=click.Choice(["vlmevalkit", "lmms-eval", "strict"]),
            default="vlmevalkit",
            show_default=True,
            help="Project whose prompts and metrics are used; strict: corrected metrics.",
        ),
        click.option(
            "--out",
            type=click.Path(file_okay=False, path_type=Path),
            help=f"Directory for {out}; nothing is written by default.",
        ),
        click.option(
            "--device",
            default="auto",
            show_default=True,
            help="Device that runs the model: auto, cpu, cuda or npu; several, as in npu:0,npu:1, run one process each.",
        ),
        count_option("--batch-size", default=64, help="Items per generation batch."),
        count_option("--max-new-tokens", default=64, help="Maximum answer length in tokens."),
        TRUST_REMOTE_CODE,
        AS_JSON,
    )

    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate
