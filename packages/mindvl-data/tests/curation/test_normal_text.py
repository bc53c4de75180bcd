# SPDX-License-Identifier: Apache-2.0
"""Normalization, tokens and shingles, by hand."""

import pytest

from mindvl_data.curation.normal_text import normalized, shingles, tokens


def test_normalization_folds_width_case_and_white_space() -> None:
    assert normalized("  \uff28ello\u3000\uff37ORLD\n!") == "hello world !"
    assert normalized("Stra\u00dfe") == "strasse"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A cat's well-known 2nd life.", ["a", "cat", "s", "well", "-", "known", "2nd", "life"]),
        ("3+4=7", ["3", "+", "4", "=", "7"]),
        ("a <= b->c", ["a", "<=", "b", "->", "c"]),
        ("+------+ a | b +---+ === x", ["a", "b", "x"]),  # lines of a table
        ("\u56fe\u50cf OCR \u6a21\u578b", ["\u56fe", "\u50cf", "ocr", "\u6a21", "\u578b"]),
        ("\u30c6\u30b9\u30c8", ["\u30c6", "\u30b9", "\u30c8"]),
        ("\ud55c\uad6d\uc5b4 \uc0ac\uc804", ["\ud55c\uad6d\uc5b4", "\uc0ac\uc804"]),
        ("\u0939\u093f\u0928\u094d\u0926\u0940", ["\u0939\u093f\u0928\u094d\u0926\u0940"]),  # marks belong to the word
        ("snake_case", ["snake", "case"]),
        ("?! ...", []),
    ],
)
def test_tokens_are_words_characters_and_operators(text: str, expected: list[str]) -> None:
    assert tokens(text) == expected


def test_shingles_are_the_distinct_runs_of_tokens() -> None:
    assert shingles(["a", "b", "a", "b", "a"], 2) == ["a b", "b a"]
    assert shingles(["a", "b"], 5) == ["a b"]
    assert shingles([], 5) == []
