# SPDX-License-Identifier: Apache-2.0
"""Files of users that list words, phrases, hosts or characters, and the linear search for many phrases in a text.

Used by the rules on texts.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindvl_data.curation.characters import CHUNK_CHARACTERS, Texts, chunks, mixed, window_hashes
from mindvl_data.errors import DataError

_CODE_POINT = re.compile(r"U\+([0-9A-Fa-f]{4,6})")
_PREFIXES = (16, 8, 4, 2, 1)

Prefixes = dict[str, list[tuple[int, frozenset[str]]]]  # beginning -> phrases by length, the longest first


def read_list(file: Path) -> list[str]:
    """The lines of a UTF-8 file without spaces at the ends; empty lines are left out.

    Raises:
        DataError: The file cannot be read or is not UTF-8.
    """
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{file}: the list cannot be read: {error}. Give a UTF-8 file with one entry per line."
        ) from error
    return [line.strip() for line in lines if line.strip()]


def read_characters(file: Path) -> set[str]:
    """The characters of a file with one character per line, given as itself or as its code point, for example U+000A."""
    found: set[str] = set()
    for line in read_list(file):
        code = _CODE_POINT.fullmatch(line)
        found.update(chr(int(code[1], 16)) if code else line)
    return found


def require_files(config: Any, context: Any = None) -> None:
    """`prepare` of steps: check the files that a configuration names.

    Raises:
        DataError: A file does not exist or cannot be read.
    """
    for field in fields(config):
        value = getattr(config, field.name)
        for file in value if isinstance(value, tuple) else (value,):
            if isinstance(file, Path):
                read_list(file)


def folded(text: str) -> str:
    """The text with case, width and spaces made equal: NFKC, case folding, single spaces."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    return " ".join(text.casefold().split())


class Phrases:
    """Searches for many phrases in many texts, in time linear in the texts.

    A phrase that begins or ends with a letter or number that is not a Chinese, Japanese, Korean or Thai character must begin
    or end there in the text: `ass` is not found in `class`.

    The first 16, 8, 4, 2 or 1 characters of each phrase are hashed, the longest that it has. The hashes of all windows of
    these sizes are looked up in the hashes of the phrases, and each hit is compared with the phrases that begin so.
    """

    def __init__(self, phrases: Iterable[str]) -> None:
        by_prefix: dict[int, dict[str, set[str]]] = {}
        for phrase in filter(None, map(folded, phrases)):
            size = next(size for size in _PREFIXES if size <= len(phrase))
            by_prefix.setdefault(size, {}).setdefault(phrase[:size], set()).add(phrase)
        self._by_prefix = {
            size: {prefix: _lengths(found) for prefix, found in prefixes.items()}
            for size, prefixes in sorted(by_prefix.items())
        }
        self._hashes = {
            size: np.sort(np.concatenate([_prefix_hash(prefix, size) for prefix in prefixes]))
            for size, prefixes in self._by_prefix.items()
        }

    def find(self, texts: list[str]) -> Iterator[tuple[int, int, str]]:
        """(text, position, phrase) of occurrences in folded texts; they may overlap."""
        pieces = [
            (owner, start, text[start : start + CHUNK_CHARACTERS + _PREFIXES[0] - 1])
            for owner, text in enumerate(texts)
            for start in range(0, len(text), CHUNK_CHARACTERS)
        ]
        done = 0
        for joined in chunks([piece for _, _, piece in pieces]):
            values = mixed(joined.codes)
            for size, prefixes in self._by_prefix.items():
                hits = _members(window_hashes(values, size), self._hashes[size])
                owners = np.searchsorted(joined.starts, hits, "right") - 1
                positions = hits - joined.starts[owners]
                for number, position in zip((owners + done).tolist(), positions.tolist(), strict=True):
                    owner, start, _ = pieces[number]
                    if position < CHUNK_CHARACTERS:  # what follows is searched in the next piece
                        yield from _found(texts[owner], start + position, prefixes, size, owner)
            done += len(joined.starts)


def _found(text: str, position: int, prefixes: Prefixes, size: int, owner: int) -> Iterator[tuple[int, int, str]]:
    """The longest phrase that begins at a position with the hash of a prefix."""
    if not _ends_word(text, position):
        return
    for length, phrases in prefixes.get(text[position : position + size], ()):
        phrase = text[position : position + length]
        if phrase in phrases and _ends_word(text, position + length):
            yield owner, position, phrase
            return


def _lengths(phrases: set[str]) -> list[tuple[int, frozenset[str]]]:
    """The phrases by length, the longest first."""
    by_length: dict[int, set[str]] = {}
    for phrase in phrases:
        by_length.setdefault(len(phrase), set()).add(phrase)
    return [(length, frozenset(found)) for length, found in sorted(by_length.items(), reverse=True)]


def _prefix_hash(prefix: str, size: int) -> NDArray[np.uint64]:
    return window_hashes(mixed(Texts.of([prefix]).codes), size)[:1]


def _members(values: NDArray[np.uint64], members: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Positions of the values that are members; most are excluded by a table of 16 bits of the hash."""
    shift = np.uint64(48)
    table = np.zeros(1 << 16, np.bool_)
    table[members >> shift] = True
    candidates = np.flatnonzero(table[values >> shift])
    places = np.minimum(np.searchsorted(members, values[candidates]), len(members) - 1)
    return candidates[members[places] == values[candidates]]


def _ends_word(text: str, position: int) -> bool:
    """Whether no word continues over this position."""
    return not (0 < position < len(text) and _in_word(text[position - 1]) and _in_word(text[position]))


def _in_word(character: str) -> bool:
    """Whether words of the character's script are separated by spaces."""
    code = ord(character)
    return character.isalnum() and not (
        0x0E00 <= code < 0x0F00 or 0x2E80 <= code < 0xE000 or 0xF900 <= code < 0xFB00 or code >= 0x20000
    )
