# SPDX-License-Identifier: Apache-2.0
"""Texts of a batch as one array of code points: counts, words and n-gram frequencies without a loop over characters.

Comes after record.py, used by the text rules. Every result belongs to one text and does not depend on the other texts of
the batch: n-grams are compared by hashes of 52 bits that depend on their characters only.
"""

import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.bool_]  # [0x110000], whether a code point belongs to a class

CHUNK_TEXTS = 1 << 12  # n-grams of at most so many texts are sorted together
CHUNK_CHARACTERS = 1 << 15  # texts are processed in chunks of about this size, which fits into the cache of a core
_HASH_BITS = 52
_SLOT_BITS = 18
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that it has an inverse modulo 2**64
_INVERSE = np.uint64(pow(0x9E3779B97F4A7C15, -1, 1 << 64))
_SEPARATORS = (" ", "\n", "\t")
_ASSIGNED = 0x34000  # code points from here to the tags and private planes are not assigned
_TAGS = range(0xE0000, 0xE01F0)
# Ideographs of Chinese: extension A, the main block, compatibility ideographs, extensions B to H
_IDEOGRAPHS = ((0x3400, 0x4DC0), (0x4E00, 0xA000), (0xF900, 0xFB00), (0x20000, 0x323B0))


@dataclass(frozen=True)
class Texts:
    """Texts joined by line ends.

    Attributes:
        codes: Code points of all texts, each text followed by a line end [C].
        starts: Position of each text in `codes` [R].
        lengths: Characters of each text [R].
    """

    codes: NDArray[np.uint32]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]

    @classmethod
    def of(cls, texts: Sequence[str]) -> "Texts":
        """Join texts."""
        lengths = np.fromiter(map(len, texts), np.int64, len(texts))
        joined = "\n".join(texts) + "\n"
        codes = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), np.uint32)
        return cls(codes, np.cumsum(lengths + 1) - lengths - 1, lengths)

    def count(self, table: Table) -> NDArray[np.int64]:
        """Characters of each text that belong to a class [R]."""
        return self._per_text(table[self.codes])

    def words(self, special: Table, *, ideographs: bool) -> "Words":
        """Words of all texts: parts between spaces, tabs and line ends, without special characters at both ends.

        Args:
            special: Characters that are removed from the ends of words; words without other characters do not count.
            ideographs: Each Chinese ideograph is a word of its own.
        """
        breaks = separators()[self.codes]
        kept = ~(special[self.codes] | breaks)
        if ideographs and (single := chinese()[self.codes]).any():
            kept |= single
            breaks = breaks | single
            breaks[1:] |= single[:-1]  # what follows an ideograph is another word
        positions = np.flatnonzero(kept)
        part = np.cumsum(breaks, dtype=np.int64)[positions]
        if len(part) == 0:
            return Words(positions, positions, positions, len(self.starts))
        edges = np.flatnonzero(part[1:] != part[:-1])
        first = positions[np.concatenate(([0], edges + 1))]
        last = positions[np.concatenate((edges, [len(part) - 1]))]
        return Words(first, last, np.searchsorted(self.starts, first, "right") - 1, len(self.starts))

    def word_hashes(self, words: "Words") -> NDArray[np.uint64]:
        """A hash of each word's characters [W]."""
        powers = np.cumprod(np.full(len(self.codes), _FACTOR))  # products and sums are modulo 2**64
        sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(mixed(self.codes) * powers)))
        inverse = np.cumprod(np.full(len(self.codes), _INVERSE))
        return mixed((sums[words.last + 1] - sums[words.first]) * inverse[words.first])

    def repeated_characters(self, size: int) -> NDArray[np.float64]:
        """Share of character n-grams of `size` characters that belong to the most frequent ones [R].

        The most frequent n-grams are as many as the square root of the number of distinct n-grams, and each occurs at least
        twice. This is the character repetition ratio of the ROOTS corpus and data-juicer; 0 for shorter texts.
        """
        owner = np.repeat(np.arange(len(self.starts)), self.lengths + 1)
        texts, counts = _repeated(mixed(self.codes), owner, size, skip_last=1)
        total = np.maximum(self.lengths - size + 1, 0)
        repeated = np.bincount(texts, minlength=len(total))
        distinct = total - np.bincount(texts, counts - 1, len(total)).astype(np.int64)
        order = np.lexsort((-counts, texts))
        texts, counts = texts[order], counts[order]
        rank = np.arange(len(texts)) - (np.cumsum(repeated) - repeated)[texts]
        top = rank < np.sqrt(distinct).astype(np.int64)[texts]
        return _ratio(np.bincount(texts[top], counts[top], len(total)), total)

    def _per_text(self, flags: NDArray[np.bool_]) -> NDArray[np.int64]:
        if not len(self.starts):
            return np.zeros(0, np.int64)
        counts: NDArray[np.int64] = np.add.reduceat(flags, self.starts, dtype=np.int64)
        return counts - flags[self.starts + self.lengths]  # without the line end that follows the text


@dataclass(frozen=True)
class Words:
    """Positions of words: first and last character [W], and the text of each [W]."""

    first: NDArray[np.int64]
    last: NDArray[np.int64]
    owner: NDArray[np.int64]
    num_texts: int

    def count(self) -> NDArray[np.int64]:
        """Words of each text [R]."""
        return np.bincount(self.owner, minlength=self.num_texts)

    def repeated(self, hashes: NDArray[np.uint64], size: int) -> NDArray[np.float64]:
        """Share of n-grams of `size` words that occur more than once in their text [R]; 0 for shorter texts."""
        texts, counts = _repeated(hashes, self.owner, size, skip_last=0)
        total = np.maximum(self.count() - size + 1, 0)
        return _ratio(np.bincount(texts, counts, self.num_texts), total)


def chunks(texts: Sequence[str]) -> Iterator[Texts]:
    """Texts in chunks of bounded size, in order."""
    start = size = 0
    for number, text in enumerate(texts):
        if number > start and (size + len(text) > CHUNK_CHARACTERS or number - start == CHUNK_TEXTS):
            yield Texts.of(texts[start:number])
            start, size = number, 0
        size += len(text)
    if start < len(texts):
        yield Texts.of(texts[start:])


def measured(measure: Callable[[Texts], NDArray[Any]], texts: Sequence[str]) -> NDArray[Any]:
    """The results of `measure`, one per text, in chunks of bounded size."""
    return np.concatenate([measure(part) for part in chunks(texts)]) if texts else np.zeros(0)


def mixed(values: NDArray[np.uint32] | NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A 64-bit hash of each integer (the finalizer of MurmurHash3)."""
    hashed = values.astype(np.uint64) + np.uint64(1)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        hashed ^= hashed >> np.uint64(33)
        hashed *= np.uint64(factor)
    hashed ^= hashed >> np.uint64(33)
    return hashed


def hash_word(word: str) -> np.uint64:
    """The hash that `Texts.word_hashes` gives to a word."""
    codes = np.frombuffer(word.encode("utf-32-le", "surrogatepass"), np.uint32)
    return mixed(np.sum(mixed(codes) * np.cumprod(np.full(len(codes), _FACTOR)), keepdims=True) * _INVERSE)[0]


def window_hashes(values: NDArray[np.uint64], size: int) -> NDArray[np.uint64]:
    """A hash of every `size` consecutive values [len(values) - size + 1], in log(size) passes."""
    if len(values) < size:
        return np.zeros(0, np.uint64)
    done, hashed, power = 0, np.zeros(0, np.uint64), values
    width = 1  # `power` holds the hashes of `width` consecutive values
    while True:
        if size & width:
            if done:
                shifted = power[done:]
                hashed = hashed[: len(shifted)] * _power(width) + shifted[: len(hashed)]
            else:
                hashed = power
            done += width
        if done == size:
            return hashed[: len(values) - size + 1]
        power = power[:-width] * _power(width) + power[width:]
        width *= 2


def _ratio(part: NDArray[Any], whole: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.divide(part, whole, out=np.zeros(len(whole)), where=whole > 0)


def _power(exponent: int) -> np.uint64:
    return np.uint64(pow(int(_FACTOR), exponent, 1 << 64))


def _repeated(
    values: NDArray[np.uint64], owner: NDArray[np.int64], size: int, *, skip_last: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Text and frequency of each n-gram that occurs more than once in its text.

    Args:
        values: Hash of each character or word.
        owner: The text of each.
        size: Characters or words of an n-gram.
        skip_last: 1 if the last value of each text does not belong to it.
    """
    hashed = window_hashes(values, size)
    end = owner[size - 1 + skip_last :]
    inside = np.flatnonzero(owner[: len(end)] == end)
    if not len(inside):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    texts = owner[inside].astype(np.uint64)
    keys = (mixed(hashed[inside]) >> np.uint64(64 - _HASH_BITS)) | (texts << np.uint64(_HASH_BITS))
    keys = np.sort(keys[_may_repeat(keys * _FACTOR)])  # most n-grams occur once and need not be sorted
    if not len(keys):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    begins = np.concatenate(([0], np.flatnonzero(keys[1:] != keys[:-1]) + 1))
    counts = np.diff(np.concatenate((begins, [len(keys)])))
    several = counts > 1
    return (keys[begins[several]] >> np.uint64(_HASH_BITS)).astype(np.int64), counts[several]


def _may_repeat(keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """False for keys that certainly occur once: those alone in their slot of a hash table."""
    slots = (keys >> np.uint64(64 - _SLOT_BITS)).astype(np.int32)
    numbers = np.arange(len(keys), dtype=np.int32)
    table = np.empty(1 << _SLOT_BITS, np.int32)
    table[slots] = numbers  # the last key of a slot stays
    shared = np.zeros(1 << _SLOT_BITS, np.bool_)
    shared[slots[table[slots] != numbers]] = True
    return shared[slots]


def _table(members: Iterable[int]) -> Table:
    table = np.zeros(sys.maxunicode + 1, np.bool_)
    table[np.fromiter(members, np.int64)] = True
    return table


def table_of(characters: Iterable[str]) -> Table:
    """The class of the given characters; strings of several characters are left out."""
    return _table(ord(character) for character in characters if len(character) == 1)


@cache
def separators() -> Table:
    """Characters between words: space, tab and line end."""
    return table_of(_SEPARATORS)


@cache
def chinese() -> Table:
    """Chinese ideographs."""
    return _table(code for start, stop in _IDEOGRAPHS for code in range(start, stop))


@cache
def alphanumeric() -> Table:
    """Letters and numbers, as str.isalnum defines them."""
    return _table(code for code in range(_ASSIGNED) if chr(code).isalnum())


@cache
def _categories() -> dict[str, list[int]]:
    """Code points by the first letter of their general category, and "Cc", "Cf" apart; without unassigned ones."""
    found: dict[str, list[int]] = {}
    for code in (*range(_ASSIGNED), *_TAGS):
        category = unicodedata.category(chr(code))
        found.setdefault(category if category[0] == "C" else category[0], []).append(code)
    return found


@cache
def special() -> Table:
    """Punctuation and symbols."""
    return _table(code for first in "PS" for code in _categories().get(first, ()))


@cache
def spaces() -> Table:
    """Characters that str.isspace accepts."""
    return _table(code for code in range(_ASSIGNED) if chr(code).isspace())


@cache
def garbled() -> Table:
    """Characters that clean text does not contain.

    Control characters except tab and line ends, private use, unassigned code points, lone surrogates, the replacement
    character and the object replacement character.
    """
    table = np.ones(sys.maxunicode + 1, np.bool_)
    for name, codes in _categories().items():
        if name not in ("Cc", "Co", "Cn", "Cs"):
            table[codes] = False
    table[[ord(character) for character in "\t\n\r\f"]] = False
    table[[0xFFFD, 0xFFFC]] = True
    return table
