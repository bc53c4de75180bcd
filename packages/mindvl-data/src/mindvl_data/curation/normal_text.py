# SPDX-License-Identifier: Apache-2.0
"""Normalized text, its tokens, and shingles of tokens, for duplicates and decontamination.

Normalized text: Unicode NFKC (full-width forms become ASCII), case folded, white space collapsed. Tokens: each run of letters,
digits and marks; each character of a script without spaces (Chinese, Japanese, Thai, Lao, Khmer, Burmese) by itself; each
operator of one or two of the characters + - * / = < > ^ %, because they distinguish formulas. Longer runs of these are
lines of tables; they and other punctuation are ignored.
"""

import re
import sys
import unicodedata
from functools import cache

_ALONE = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
_OPERATOR = "(?<![-+*/=<>^%])[-+*/=<>^%]{1,2}(?![-+*/=<>^%])"
_SPACE = re.compile(r"\s+")


def normalized(text: str) -> str:
    """The text in NFKC, case folded, with single spaces."""
    return _SPACE.sub(" ", unicodedata.normalize("NFKC", text).casefold()).strip()


def tokens(text: str) -> list[str]:
    """Words, characters of scripts without spaces, and operators of the normalized text."""
    return _token_pattern().findall(normalized(text))


def shingles(words: list[str], size: int) -> list[str]:
    """All runs of `size` tokens, joined by spaces, without repetition; a shorter text is one shingle, an empty one none."""
    if not words:
        return []
    count = max(1, len(words) - size + 1)
    return list(dict.fromkeys(" ".join(words[start : start + size]) for start in range(count)))


@cache
def _token_pattern() -> re.Pattern[str]:
    marks = (chr(code) for code in range(0x300, sys.maxunicode) if unicodedata.category(chr(code)) in ("Mn", "Mc"))
    return re.compile(rf"[{_ALONE}]|[^\W_{_ALONE}](?:[^\W_{_ALONE}]|[{''.join(marks)}])*|{_OPERATOR}")
