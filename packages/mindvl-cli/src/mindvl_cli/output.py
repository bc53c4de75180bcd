# SPDX-License-Identifier: Apache-2.0
"""Escape control characters and hide secrets in text for a terminal or a log.

Comes last: failures.py and logs.py pass every message through `message`, and `main` wraps standard output and error in
`Guarded`, for the output of commands and other libraries. File names, keys and records come from others, and an escape
sequence in them could hide text, change the terminal's title or forge a log line.
"""

import re
import runpy
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

# Control characters: C0 except tab and newline, DEL, C1, line separators, text direction marks, and surrogates, which
# cannot be written.
_CONTROL = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_COLOUR = r"\x1b\[[0-9;]*m"
_DRAWING = r"\r|\x1b\[\??[0-9;]*[A-Za-z]"  # colours, and the cursor movements of a progress bar


def escaped(text: str, *, keep: str = r"(?!)") -> str:
    r"""The text with control characters as `\x1b` or `\u202e`; tabs and newlines stay.

    Args:
        keep: Regular expression of text that is not escaped.
    """
    return _pattern(keep).sub(lambda found: found[1] or _escape(found[2]), text)


def message(text: str) -> str:
    """The message, escaped and without passwords, keys, tokens and signatures."""
    return escaped(_redact()(text))


class Guarded:
    """A text stream that escapes control characters; all other attributes are those of the wrapped stream.

    Args:
        hides_secrets: Also hide secrets; off for standard output, where records are shown unchanged.
        may_draw: Keep the cursor movements of progress bars, not only colours.
    """

    def __init__(self, stream: TextIO, *, hides_secrets: bool, may_draw: bool) -> None:
        self._stream = stream
        self._hides_secrets = hides_secrets
        self._keep = _DRAWING if may_draw else _COLOUR

    def write(self, text: str) -> int:
        """Write the text, escaped."""
        shown = _redact()(text) if self._hides_secrets else text
        self._stream.write(escaped(shown, keep=self._keep))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write each of the lines, escaped."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@cache
def _pattern(keep: str) -> re.Pattern[str]:
    return re.compile(f"({keep})|([{_CONTROL}])")


def _escape(character: str) -> str:
    return f"\\x{ord(character):02x}" if ord(character) < 256 else f"\\u{ord(character):04x}"


@cache
def _redact() -> Callable[[str], str]:
    """mindvl_data's `redact`, run from its file: importing the package would load torch to report a typing mistake."""
    package = find_spec("mindvl_data")
    assert package is not None
    assert package.origin is not None
    function: Callable[[str], str] = runpy.run_path(str(Path(package.origin).with_name("errors.py")))["redact"]
    return function
