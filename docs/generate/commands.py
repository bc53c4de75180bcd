# SPDX-License-Identifier: Apache-2.0
"""Reference of the `mindvl` command: every command and option, from click.

Comes before stage.py.
"""

import inspect
from collections.abc import Iterator

import click

from mindvl_cli.main import cli


def command_pages() -> str:
    """Markdown of all commands, in the order of `mindvl --help`."""
    context = click.Context(cli, info_name="mindvl")
    parts = [_help(cli.help or "")]
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None, name
        parts += _describe(command, click.Context(command, info_name=name, parent=context), 2)
    return "\n\n".join(parts)


def _describe(command: click.Command, context: click.Context, level: int) -> Iterator[str]:
    yield f"{'#' * level} mindvl {context.command_path.removeprefix('mindvl ')}"
    if not isinstance(command, click.Group):
        usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
        yield f"```text\n{usage}\n```"
    yield _help(command.help or "")
    rows = [row for parameter in command.params if (row := _row(parameter, context))]
    if rows:
        yield "\n".join(["| option | meaning |", "|---|---|", *rows])
    if command.epilog:
        yield _help(command.epilog.replace("   or   ", "\n"))
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None, name
            yield from _describe(below, click.Context(below, info_name=name, parent=context), level + 1)


def _help(text: str) -> str:
    """A help text; a paragraph that begins with Example is shown as it is."""
    paragraphs = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if paragraph.startswith("\b\n"):  # lines that click does not rewrap
            paragraphs.append(f"```text\n{paragraph[2:]}\n```")
            continue
        head, colon, rest = paragraph.partition("xample: ")
        if colon and not head.strip(" Ee"):
            commands = "\n".join(line.strip() for line in rest.splitlines())
            paragraphs.append(f"Example:\n\n```sh\n{commands}\n```")
        elif paragraph.startswith("Examples:"):
            paragraphs.append(f"Examples:\n\n```sh\n{inspect.cleandoc(paragraph.partition(chr(10))[2])}\n```")
        else:
            paragraphs.append(_escape(paragraph))
    return "\n\n".join(paragraphs)


def _row(parameter: click.Parameter, context: click.Context) -> str | None:
    record = None if isinstance(parameter, click.Argument) else parameter.get_help_record(context)
    if record is None:  # arguments have no help text of their own: the usage and the description name them
        return None
    names, meaning = record
    return f"| `{names}` | {_escape(meaning)} |".replace("\n", " ")


def _escape(text: str) -> str:
    """Text of a help message as Markdown: angle brackets, pipes and stars mean themselves."""
    for sign in "\\<>|*_[]":
        text = text.replace(sign, f"\\{sign}")
    return text
