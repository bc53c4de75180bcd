# SPDX-License-Identifier: Apache-2.0
"""Text on its way to a terminal or a log: control characters are escaped, and secrets in addresses hidden.

Comes last: failures.py and logs.py pass every message through `message`, and `main` puts `Guarded` around standard
output and error, for what commands and other libraries print. File names, keys and records are written by others, and
an escape sequence in them could hide text, change the terminal's title or forge a line of a log.
"""

import re
import runpy
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

# Everything that a terminal obeys or that changes the order of what is read: C0 but tab and newline, DEL, C1, line
# separators, marks of direction; and halves of character pairs, which cannot be written at all.
_CONTROL = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_COLOUR = r"\x1b\[[0-9;]*m"
_DRAWING = r"\r|\x1b\[\??[0-9;]*[A-Za-z]"  # colours, and the movements of a progress bar


def escaped(text: str, *, keep: str = r"(?!)") -> str:
    r"""The text with control characters as `\x1b` or `\u202e`; tabs and newlines stay.

    Args:
        keep: A regular expression of what stays as it is.
    """
    return _pattern(keep).sub(lambda found: found[1] or _escape(found[2]), text)


def message(text: str) -> str:
    """A message as it may be shown: escaped, and without passwords, keys, tokens and signatures."""
    return escaped(_redact()(text))


class Guarded:
    """A text stream that escapes control characters in what is written to it; everything else is the stream's.

    Args:
        hides_secrets: Also hide secrets. Not for standard output: records may be shown there as they are.
        may_draw: Let the movements of progress bars through, not colours alone.
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
    """mindvl_data's `redact`, from its file: importing the package would load torch to report a typing mistake."""
    package = find_spec("mindvl_data")
    assert package is not None
    assert package.origin is not None
    function: Callable[[str], str] = runpy.run_path(str(Path(package.origin).with_name("errors.py")))["redact"]
    return function
