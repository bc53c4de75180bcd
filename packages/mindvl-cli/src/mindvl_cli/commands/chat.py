# SPDX-License-Identifier: Apache-2.0
"""`mindvl chat`: talk to a model directory in the terminal, or answer the lines of standard input."""

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mindvl_cli.commands.options import TRUST_REMOTE_CODE, FiniteRange, count_option
from mindvl_cli.failures import CliError, is_ours, one_line
from mindvl_cli.hub import MODEL_DIRECTORY

if TYPE_CHECKING:
    from mindvl_merge.evaluation import Conversation

_COMMANDS = (
    "/image PATH attaches an image to the next question, /clear starts a new conversation, /exit ends the command."
)


@click.command(epilog='Example: mindvl chat model --image page.png --prompt "What is written here?"')
@click.argument("model", type=MODEL_DIRECTORY)
@click.option("--prompt", help="A single question; its answer is printed and the command ends.")
@click.option(
    "--image", "images", type=click.Path(exists=True, dir_okay=False, path_type=Path), multiple=True,
    help="Image file for the first question; may be repeated.",
)  # fmt: skip
@count_option("--max-new-tokens", default=1024, help="Maximum answer length in tokens.")
@click.option(
    "--temperature", type=FiniteRange(min=0), default=0.0, show_default=True,
    help="Sampling temperature; 0 decodes greedily.",
)  # fmt: skip
@click.option(
    "--device", default="auto", show_default=True, help="Device that runs the model: auto, cpu, cuda:0 or npu:0."
)
@TRUST_REMOTE_CODE
def chat(
    model: Path,
    prompt: str | None,
    images: tuple[Path, ...],
    max_new_tokens: int,
    temperature: float,
    device: str,
    trust_remote_code: bool,
) -> None:
    """Talk to MODEL, a model directory in the transformers layout, or the id of a model in the cache of huggingface_hub.

    In the conversation, `/image PATH` attaches an image to the next question, `/clear` starts a new one, `/exit` ends it,
    and Ctrl-C stops an answer. If standard input is not a terminal, each line is a question or one of these commands.
    """
    from mindvl_cli.predictor import make_predictor
    from mindvl_merge.evaluation import Conversation, PredictConfig

    config = PredictConfig(device=device, max_new_tokens=max_new_tokens)
    predictor = make_predictor(model, config=config, cache=None, trust_remote_code=trust_remote_code)
    start = time.perf_counter()
    predictor.load_all()
    click.echo(f"loaded {model} on {predictor.device} in {time.perf_counter() - start:.1f} s", err=True)
    conversation = Conversation(predictor, temperature=temperature)
    if prompt is not None:
        _answer(conversation, prompt, images)
        return
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        click.echo(_COMMANDS, err=True)
    talk(conversation, images, is_terminal=is_terminal)


def talk(conversation: "Conversation", images: tuple[Path, ...], *, is_terminal: bool) -> None:
    """Answer the lines of standard input until it ends.

    Args:
        images: Images of the first question.
        is_terminal: Show a prompt, and continue after an error.
    """
    waiting = list(images)  # of the next question
    for line in _lines(is_terminal):
        command, _, argument = line.partition(" ")
        try:
            if command == "/exit":
                return
            if command == "/clear":
                conversation.clear()
                waiting = []
            elif command == "/image":
                waiting.append(_image(argument))
            elif command.startswith("/") and command[1:].isalpha():
                raise CliError(f"{command}: is not a command. {_COMMANDS}")
            else:
                attached, waiting = waiting, []
                _answer(conversation, line, tuple(attached))
        except Exception as error:
            if not is_terminal or not is_ours(error):
                raise
            click.echo(one_line(error), err=True)


def _lines(is_terminal: bool) -> Iterator[str]:
    """Lines that are not empty, until the end of the input."""
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - lets `input` edit lines and remember them
    while True:
        try:
            line = input("> ") if is_terminal else sys.stdin.readline()
        except EOFError:
            return
        if not is_terminal and not line:
            return
        if line.strip():
            yield line.strip()


def _image(text: str) -> Path:
    path = Path(text.strip()).expanduser()
    if not path.is_file():
        raise CliError(f"/image: {str(path)!r} is not a file. Write /image and the path of an image.")
    return path


def _answer(conversation: "Conversation", question: str, images: tuple[Path, ...]) -> None:
    """Print the answer while it is generated; Ctrl-C stops it on a terminal, and ends the command otherwise."""
    pieces = conversation.ask(question, images)
    try:
        for piece in pieces:
            click.echo(piece, nl=False)
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        click.echo("\n(stopped)", nl=False, err=True)
    finally:
        pieces.close()  # type: ignore[attr-defined]
    click.echo()
