# SPDX-License-Identifier: Apache-2.0
"""Steps that measure the text of a record: length, lines, kinds of characters, repetition, listed words.

Comes after record.py; text_filters.py has the rules that search for phrases, addresses and languages. The definitions are
those of data-juicer's text filters where it has the same rule, so that the same limits give the same decisions
(`mindvl bench curation`). A text is all text to train on, joined by line ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mindvl_data.curation.characters import (
    Table,
    Texts,
    alphanumeric,
    hash_word,
    measured,
    spaces,
    special,
    table_of,
)
from mindvl_data.curation.limits import Limit, apply_limits, check_range
from mindvl_data.curation.record import Record
from mindvl_data.curation.step import Context, Outcome, Step
from mindvl_data.curation.word_lists import read_characters, read_list, require_files

# Repetition and listed words are measured in this many characters of a text, in bounded time.
MEASURED_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class TextLength:
    """Limits on the length of a text.

    Attributes:
        min_characters, max_characters: Limits of the number of characters. Default minimum: 5, as LAION-5B requires of
            alt texts.
        min_words, max_words: Limits of the number of words between spaces, tabs and line ends. Default minimum: 3, as CC12M
            requires of alt texts.
        ideographs_are_words: Count each Chinese ideograph as a word.
        special_characters: File with the characters that are not part of a word at its ends, one per line or as U+000A;
            default: punctuation, symbols and spaces.
    """

    min_characters: int = 5
    max_characters: int | None = None
    min_words: int = 3
    max_words: int | None = None
    ideographs_are_words: bool = True
    special_characters: Path | None = None

    def __post_init__(self) -> None:
        check_range("characters", self.min_characters, self.max_characters)
        check_range("words", self.min_words, self.max_words)


@Step(
    config=TextLength,
    summary="Drop texts with too few or too many characters or words.",
    section="B.1.1",
    needs=("text",),
    gives=("num_characters", "num_words"),
    reasons={
        "too_short": "The text has fewer characters than min_characters.",
        "too_long": "The text has more characters than max_characters.",
        "too_few_words": "The text has fewer words than min_words.",
        "too_many_words": "The text has more words than max_words.",
    },
    prepare=require_files,
)
def text_length(records: list[Record], config: TextLength, context: Context) -> Sequence[Outcome]:
    """Drop texts that are too short or too long (paper, B.1.1: text-based criteria)."""
    texts = [record.text() for record in records]
    ends = word_ends(config.special_characters, context)
    words = measured(lambda part: part.words(ends, ideographs=config.ideographs_are_words).count(), texts)
    return apply_limits(
        records,
        {"num_characters": [len(text) for text in texts], "num_words": words},
        (
            Limit("num_characters", config.min_characters, config.max_characters, "too_short", "too_long"),
            Limit("num_words", config.min_words, config.max_words, "too_few_words", "too_many_words"),
        ),
    )


@dataclass(frozen=True)
class LineLength:
    """Limits on the lines of a text, for documents.

    Attributes:
        min_average, max_average: Limits of the characters of the text divided by its lines. Default minimum: 10, as in
            data-juicer.
        min_longest, max_longest: Limits of the characters of the longest line. Default minimum: 10, as in data-juicer.
    """

    min_average: float | None = 10
    max_average: float | None = None
    min_longest: int | None = 10
    max_longest: int | None = None

    def __post_init__(self) -> None:
        check_range("average", self.min_average, self.max_average)
        check_range("longest", self.min_longest, self.max_longest)


@Step(
    config=LineLength,
    summary="Drop texts whose lines are very short or very long.",
    section="B.1.1",
    needs=("text",),
    gives=("average_line_length", "longest_line"),
    reasons={
        "lines_too_short": "The average line is shorter than min_average.",
        "lines_too_long": "The average line is longer than max_average.",
        "longest_line_too_short": "The longest line is shorter than min_longest.",
        "longest_line_too_long": "The longest line is longer than max_longest.",
    },
)
def line_length(records: list[Record], config: LineLength, context: Context) -> Sequence[Outcome]:
    """Drop texts of very short or very long lines, such as lists of links or tables without line ends (paper, B.1.1)."""
    texts = [record.text() for record in records]
    lines = [text.splitlines() for text in texts]
    return apply_limits(
        records,
        {
            "average_line_length": [len(t) / len(of) if of else 0.0 for t, of in zip(texts, lines, strict=True)],
            "longest_line": [max(map(len, of), default=0) for of in lines],
        },
        (
            Limit("average_line_length", config.min_average, config.max_average, "lines_too_short", "lines_too_long"),
            Limit(
                "longest_line",
                config.min_longest,
                config.max_longest,
                "longest_line_too_short",
                "longest_line_too_long",
            ),
        ),
    )


@dataclass(frozen=True)
class CharacterRatios:
    """Limits on the share of kinds of characters in a text.

    Attributes:
        min_alphanumeric: Minimum share of letters and numbers. Default: 0.25, as in data-juicer.
        max_special: Maximum share of special characters. Default: 0.25, as in data-juicer, which also counts digits and
            spaces as special characters.
        special_characters: File with the special characters, one per line or as U+000A; default: punctuation and
            symbols.
    """

    min_alphanumeric: float | None = 0.25
    max_special: float | None = 0.25
    special_characters: Path | None = None

    def __post_init__(self) -> None:
        check_range("alphanumeric", self.min_alphanumeric, None)
        check_range("special", None, self.max_special)


@Step(
    config=CharacterRatios,
    summary="Drop texts with few letters and numbers or many special characters.",
    section="B.1.1",
    needs=("text",),
    gives=("alphanumeric_ratio", "special_ratio"),
    reasons={
        "few_alphanumeric": "The share of letters and numbers is below min_alphanumeric.",
        "many_special": "The share of special characters is above max_special.",
    },
    prepare=require_files,
)
def character_ratios(records: list[Record], config: CharacterRatios, context: Context) -> Sequence[Outcome]:
    """Drop texts with few letters and numbers, or with many special characters (paper, B.1.1)."""
    texts = [record.text() for record in records]
    own = config.special_characters
    signs = special_table(own, context) if own else context.resource("special", special)
    letters = context.resource("alphanumeric", alphanumeric)
    length = np.array([max(1, len(text)) for text in texts])
    return apply_limits(
        records,
        {
            "alphanumeric_ratio": measured(lambda part: part.count(letters), texts) / length,
            "special_ratio": measured(lambda part: part.count(signs), texts) / length,
        },
        (
            Limit("alphanumeric_ratio", config.min_alphanumeric, None, "few_alphanumeric", ""),
            Limit("special_ratio", None, config.max_special, "", "many_special"),
        ),
    )


@dataclass(frozen=True)
class Repetition:
    """Limits on repeated n-grams of characters and words.

    Attributes:
        characters: Length of n-grams of characters. Default: 10, as in data-juicer.
        max_characters: Maximum share of n-grams that are among the most frequent ones. As in the ROOTS corpus, these
            are as many as the square root of the number of distinct n-grams, and each occurs more than once. Default:
            0.5, as in data-juicer.
        words: Length of n-grams of words. Default: 10, as in data-juicer.
        max_words: Maximum share of n-grams of words that occur more than once. Default: 0.5, as in data-juicer.
        ideographs_are_words: Count each Chinese ideograph as a word.
        special_characters: File with the characters that are not part of a word at its ends; see text_length.
    """

    characters: int = 10
    max_characters: float = 0.5
    words: int = 10
    max_words: float = 0.5
    ideographs_are_words: bool = True
    special_characters: Path | None = None

    def __post_init__(self) -> None:
        for name in ("characters", "words"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, got {getattr(self, name)}. Use for example 10.")
        check_range("characters", None, self.max_characters)
        check_range("words", None, self.max_words)


@Step(
    config=Repetition,
    summary="Drop texts that repeat characters or words.",
    section="B.1.1",
    needs=("text",),
    gives=("character_repetition", "word_repetition"),
    reasons={
        "repeated_characters": "The share of frequent n-grams of characters is above max_characters.",
        "repeated_words": "The share of repeated n-grams of words is above max_words.",
    },
    prepare=require_files,
)
def repetition(records: list[Record], config: Repetition, context: Context) -> Sequence[Outcome]:
    """Drop texts that repeat themselves (paper, B.1.1). Measured in the first 2**20 characters."""
    ends = word_ends(config.special_characters, context)
    texts = [record.text()[:MEASURED_CHARACTERS] for record in records]

    def repeated_words(part: Texts) -> NDArray[np.float64]:
        words = part.words(ends, ideographs=config.ideographs_are_words)
        return words.repeated(part.word_hashes(words), config.words)

    return apply_limits(
        records,
        {
            "character_repetition": measured(lambda part: part.repeated_characters(config.characters), texts),
            "word_repetition": measured(repeated_words, [text.lower() for text in texts]),
        },
        (
            Limit("character_repetition", None, config.max_characters, "", "repeated_characters"),
            Limit("word_repetition", None, config.max_words, "", "repeated_words"),
        ),
    )


@dataclass(frozen=True)
class ListedWords:
    """Limits on the share of listed words in a text, for example of stop words or of flagged words.

    Attributes:
        file: Words, one per line, in lower case.
        min_ratio, max_ratio: Limits of the share of the words of a text that are in the list. data-juicer's defaults
            are a minimum of 0.3 for stop words and a maximum of 0.045 for flagged words.
        ideographs_are_words: Count each Chinese ideograph as a word.
        special_characters: File with the characters that are not part of a word at its ends; see text_length.
    """

    file: Path
    min_ratio: float | None = None
    max_ratio: float | None = None
    ideographs_are_words: bool = True
    special_characters: Path | None = None

    def __post_init__(self) -> None:
        check_range("ratio", self.min_ratio, self.max_ratio)


@Step(
    config=ListedWords,
    summary="Drop texts with too few or too many words of a list, such as stop words or flagged words.",
    section="B.1.1",
    needs=("text",),
    gives=("listed_words_ratio",),
    reasons={
        "few_listed_words": "The share of listed words is below min_ratio.",
        "many_listed_words": "The share of listed words is above max_ratio.",
    },
    prepare=require_files,
)
def listed_words(records: list[Record], config: ListedWords, context: Context) -> Sequence[Outcome]:
    """Drop texts with too few or too many words of a list (paper, B.1.1)."""
    ends = word_ends(config.special_characters, context)
    listed = context.resource(
        ("listed words", config.file), lambda: np.unique([hash_word(word.lower()) for word in read_list(config.file)])
    )

    def ratio(part: Texts) -> NDArray[np.float64]:
        words = part.words(ends, ideographs=config.ideographs_are_words)
        hits = np.isin(part.word_hashes(words), listed)
        return np.bincount(words.owner, hits, words.num_texts) / np.maximum(1, words.count())

    texts = [record.text()[:MEASURED_CHARACTERS].lower() for record in records]
    return apply_limits(
        records,
        {"listed_words_ratio": measured(ratio, texts)},
        (Limit("listed_words_ratio", config.min_ratio, config.max_ratio, "few_listed_words", "many_listed_words"),),
    )


def special_table(file: Path, context: Context) -> Table:
    """The characters that a file lists, as the table of a class."""
    return context.resource(("special", file), lambda: table_of(read_characters(file)))


def word_ends(file: Path | None, context: Context) -> Table:
    """The characters that are removed from the ends of words."""
    if file is not None:
        return special_table(file, context)
    return context.resource("word ends", lambda: special() | spaces())
