# SPDX-License-Identifier: Apache-2.0
"""Turn the errors of a command into an exit code and, for our own errors, one line on standard error.

Wraps every command (main.py). Our errors are recognized by the name and package of their base class, so that nothing
heavy is imported to report a typing mistake.
"""

import errno
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import click

from mindvl_cli.interrupts import Stopped
from mindvl_cli.output import Guarded, message
from mindvl_cli.renamed import OPTIONS

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130  # 128 + SIGINT, what a shell reports for Ctrl-C

_OUR_BASES = frozenset({"DataError", "OpsError", "ModelError", "TrainError", "MergeError", "ConfigError", "CliError"})


class CliError(Exception):
    """A command cannot work with its input; each message is `WHERE: WHAT. WHAT TO DO.`

    Several messages are printed one per line.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def is_ours(error: BaseException) -> bool:
    """Whether the message of this error is written for the user and needs no traceback."""
    return any(
        base.__name__ in _OUR_BASES and base.__module__.partition(".")[0].startswith("mindvl_")
        for base in type(error).__mro__
    )


def one_line(error: BaseException) -> str:
    """The message on one line; an error with several problems keeps one line for each."""
    problems = getattr(error, "problems", None)
    lines = [str(problem) for problem in problems] if problems else [str(error) or type(error).__name__]
    return "\n".join("error: " + message(" ".join(line.split())) for line in lines)


def run_guarded(invoke: Callable[[], object]) -> int:
    """Run one command and return its exit code; errors other than ours and OSError keep their traceback.

    Args:
        invoke: Calls click without its own error handling (`standalone_mode=False`); an int it returns is the exit
            code of `ctx.exit`.
    """
    try:
        result = invoke()
    except click.ClickException as error:
        if isinstance(error, click.NoSuchOption) and error.option_name in OPTIONS:
            what = f"{error.option_name}: was renamed. Use {OPTIONS[error.option_name]}."
            error = click.UsageError(what, error.ctx)
        shown: Any = Guarded(sys.stderr, hides_secrets=True, may_draw=True)
        error.show(shown)
        return error.exit_code
    except Stopped as stopped:
        signal.setitimer(signal.ITIMER_REAL, 0)  # it has arrived, and would be raised again while this is printed
        click.echo(str(stopped), err=True)
        return stopped.exit_code
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output has ended, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at exit
        return EXIT_FAILED
    except OSError as error:
        logging.getLogger(__name__).debug("the traceback of this error", exc_info=error)
        click.echo(one_line(CliError(_of_machine(error))), err=True)
        return EXIT_FAILED
    except Exception as error:
        if not is_ours(error):
            raise
        sys.stdout.flush()
        click.echo(one_line(error), err=True)
        return EXIT_FAILED
    return result if isinstance(result, int) else 0


def _of_machine(error: OSError) -> str:
    """The message of an OSError that no package turned into its own error."""
    what = error.strerror or str(error) or type(error).__name__
    where = "operating system" if error.filename is None else error.filename
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        to_do = "Free space on that disk or choose another one, and start the same command again."
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR, errno.EISDIR):
        to_do = "Choose another path, or change its permissions."
    else:
        to_do = "Check the path and the disk, and start the same command again."
    return f"{where}: {what}. {to_do}"
