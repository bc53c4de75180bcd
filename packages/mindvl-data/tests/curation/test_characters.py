# SPDX-License-Identifier: Apache-2.0
"""Counts, words and n-grams of many texts at once, compared with loops over each text."""

import random
import re
from collections import Counter
from math import isqrt

import numpy as np
import pytest

from mindvl_data.curation.characters import (
    CHUNK_CHARACTERS,
    Texts,
    alphanumeric,
    chunks,
    garbled,
    hash_word,
    measured,
    special,
    table_of,
    window_hashes,
)

SPECIAL = ".,- \t\n\r\u3000"
ALPHABET = "ab c\t\n.,\u4e2d\u6587\u3000\r1-"


def made_texts(count: int) -> list[str]:
    generator = random.Random(1)
    lengths = (0, 1, 2, 5, 30, 300)
    return ["".join(generator.choices(ALPHABET, k=generator.choice(lengths))) for _ in range(count)]


def words_of(text: str) -> list[str]:
    return [word for word in (part.strip(SPECIAL) for part in re.split("[ \n\t]", text)) if word]


def repeated_characters(text: str, size: int) -> float:
    counts = sorted(Counter(text[i : i + size] for i in range(len(text) - size + 1)).values(), reverse=True)
    top = min(isqrt(len(counts)), sum(count > 1 for count in counts))
    return sum(counts[:top]) / sum(counts) if counts else 0.0


def repeated_words(text: str, size: int) -> float:
    words = words_of(text)
    counts = Counter(tuple(words[i : i + size]) for i in range(len(words) - size + 1)).values()
    return sum(count for count in counts if count > 1) / sum(counts) if counts else 0.0


@pytest.mark.parametrize("size", [1, 2, 3, 10])
def test_repetition_and_words_equal_a_loop_over_each_text(size: int) -> None:
    texts = made_texts(400)
    table = table_of(SPECIAL)

    def of_words(part: Texts) -> np.ndarray:
        words = part.words(table, ideographs=False)
        return words.repeated(part.word_hashes(words), size)

    assert measured(lambda part: part.repeated_characters(size), texts).tolist() == [
        repeated_characters(text, size) for text in texts
    ]
    assert measured(of_words, texts).tolist() == [repeated_words(text, size) for text in texts]
    assert measured(lambda part: part.words(table, ideographs=False).count(), texts).tolist() == [
        len(words_of(text)) for text in texts
    ]


def test_results_do_not_depend_on_the_other_texts_of_the_batch() -> None:
    texts = [*made_texts(50), "abc" * CHUNK_CHARACTERS]
    together = measured(lambda part: part.repeated_characters(3), texts)
    alone = [measured(lambda part: part.repeated_characters(3), [text])[0] for text in texts]
    assert together.tolist() == alone
    count = CHUNK_CHARACTERS  # abc occurs so often, bca and cab once less; one of three distinct n-grams is counted
    assert together[-1] == count / (3 * count - 2)


def test_each_ideograph_is_a_word_and_the_letters_between_ideographs_are_one() -> None:
    part = Texts.of(["\u4e00\u53ea ab\u732bcd, \u3002", "", "x"])
    words = part.words(special(), ideographs=True)
    assert words.count().tolist() == [5, 0, 1]  # two ideographs, ab, one ideograph, cd
    found = [part.codes[a : b + 1].tobytes().decode("utf-32-le") for a, b in zip(words.first, words.last, strict=True)]
    assert found == ["\u4e00", "\u53ea", "ab", "\u732b", "cd", "x"]


def test_the_hash_of_a_word_does_not_depend_on_its_place() -> None:
    part = Texts.of(["the cat", "(cat) tac the"])
    words = part.words(special(), ideographs=False)
    hashes = part.word_hashes(words).tolist()
    assert hashes == [int(hash_word(word)) for word in ("the", "cat", "cat", "tac", "the")]
    assert len(set(hashes)) == 3


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 10, 16])
def test_windows_have_the_same_hash_exactly_if_their_values_are_equal(size: int) -> None:
    values = np.random.default_rng(0).integers(0, 2, 300, dtype=np.uint64)
    hashes = window_hashes(values, size).tolist()
    windows = [tuple(values[i : i + size]) for i in range(len(values) - size + 1)]
    assert len(hashes) == len(windows)
    assert len(set(zip(hashes, windows, strict=True))) == len(set(hashes)) == len(set(windows))


def test_the_tables_agree_with_python_for_every_code_point() -> None:
    assert [chr(code) for code in np.flatnonzero(alphanumeric())] == [
        chr(code) for code in range(0x110000) if chr(code).isalnum()
    ]
    assert all(special()[ord(character)] for character in "!+%\u3002\u2603")
    assert not any(special()[ord(character)] for character in "a7 \n\u4e2d")
    assert all(garbled()[ord(character)] for character in "\ufffd\x00\x85\ue000\ud800")
    assert not any(garbled()[ord(character)] for character in "a\n\t\u200d\ufe0f\u4e2d\U0001f600")


def test_chunks_keep_the_order_and_every_text() -> None:
    texts = ["a" * (CHUNK_CHARACTERS - 1), "bb", "", "c" * 3 * CHUNK_CHARACTERS, "d"]
    assert [part.lengths.tolist() for part in chunks(texts)] == [
        [CHUNK_CHARACTERS - 1],
        [2, 0],
        [3 * CHUNK_CHARACTERS],
        [1],
    ]
    assert list(chunks([])) == []
