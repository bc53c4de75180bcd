# SPDX-License-Identifier: Apache-2.0
"""Set the handlers of Python's logging: warnings of rank 0 to the console, everything to a file for every rank.

Called before a command starts its work; the packages only call `logging.getLogger(__name__)`. Progress on the console
comes from progress.py and from the commands.
"""

import copy
import logging
import sys
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from mindvl_cli.output import message

CONSOLE_FORMAT = "%(message)s"
FILE_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class _Formatter(logging.Formatter):
    """Escapes control characters and hides secrets, of our messages and of other libraries' alike."""

    def format(self, record: logging.LogRecord) -> str:
        """The lines of a record; further lines of its message are indented, so that they cannot be mistaken for records."""
        record = copy.copy(record)
        record.msg, record.args = record.getMessage().replace("\n", "\n    "), None
        record.exc_text = None  # another handler may have stored an unescaped traceback
        return message(super().format(record))


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to the current sys.stderr, so that a progress bar can replace it while it is drawn."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


class _LogFile(logging.FileHandler):
    """A log file that reports a write error once, not with a traceback for every line."""

    _failed = False

    def close(self) -> None:
        """Close the file; a write error was reported before."""
        with suppress(OSError):
            super().close()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's own name
        """Called by logging inside its exception handler."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._failed:
            self._failed = True
            text = (
                f"{self.baseFilename}: cannot be written ({error.strerror or error}). The command continues without this log; "
                "free space on the disk."
            )
            print(message(text), file=sys.stderr)


def set_up_logging(*, rank: int = 0, log_dir: Path | None = None, verbose: bool = False) -> None:
    """Replace the handlers set by an earlier call; may be called again once the rank is known.

    Args:
        rank: Global rank; rank 0 logs warnings on the console, the other ranks only errors.
        log_dir: Directory for `rank-0000.log` and so on; created if missing. None writes no file.
        verbose: Log debug messages of our packages on the console; other libraries stay at warnings.
    """
    root = logging.getLogger()
    for handler in list(root.handlers):
        if getattr(handler, "set_by_mindvl", False):
            root.removeHandler(handler)
            handler.close()
    console = _StderrHandler()
    console.setLevel(logging.ERROR if rank else logging.DEBUG if verbose else logging.WARNING)
    console.setFormatter(_Formatter(CONSOLE_FORMAT))
    handlers: list[logging.Handler] = [console]
    if log_dir is not None:
        log_dir.mkdir(parents=True, exist_ok=True)
        file_handler = _LogFile(log_dir / f"rank-{rank:04d}.log", encoding="utf-8")
        file_handler.setFormatter(_Formatter(FILE_FORMAT))
        handlers.append(file_handler)
    for handler in handlers:
        handler.set_by_mindvl = True  # type: ignore[attr-defined]
        root.addHandler(handler)
    root.setLevel(logging.WARNING)
    for package in ("data", "ops", "model", "train", "merge", "cli"):
        logging.getLogger(f"mindvl_{package}").setLevel(logging.DEBUG if verbose else logging.INFO)
