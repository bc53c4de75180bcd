# SPDX-License-Identifier: Apache-2.0
"""Lists of users, and the search for many phrases."""

import random
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from mindvl_data.curation.characters import CHUNK_CHARACTERS
from mindvl_data.curation.word_lists import Phrases, folded, read_characters, read_list, require_files
from mindvl_data.errors import DataError


def test_the_search_finds_what_a_regular_expression_per_phrase_finds() -> None:
    generator = random.Random(3)
    phrases = {"".join(generator.choices("ab ", k=generator.randint(1, 20))).strip() for _ in range(60)}
    phrases = {folded(phrase) for phrase in phrases} - {""}
    texts = [folded("".join(generator.choices("ab .", k=200))) for _ in range(50)]
    expected = {
        (owner, found.start(), phrase)
        for owner, text in enumerate(texts)
        for phrase in phrases
        for found in re.finditer(rf"(?=\b{re.escape(phrase)}\b)", text)
    }
    found = set(Phrases(phrases).find(texts))
    # of the phrases with the same beginning only the longest is reported at a position
    assert found <= expected
    assert {(owner, position) for owner, position, _ in found} == {(owner, position) for owner, position, _ in expected}


def test_a_phrase_does_not_continue_into_the_next_text() -> None:
    assert list(Phrases(["one two"]).find(["one", "two", "one two"])) == [(2, 0, "one two")]


def test_phrases_are_found_in_texts_that_are_searched_in_several_pieces() -> None:
    phrase = "a phrase of more than sixteen letters"
    positions = [0, CHUNK_CHARACTERS - 20, 2 * CHUNK_CHARACTERS - 1, 3 * CHUNK_CHARACTERS]
    text = [" "] * (3 * CHUNK_CHARACTERS + 100)
    for position in positions:
        text[position : position + len(phrase)] = phrase
    assert [position for _, position, _ in Phrases([phrase, "unused"]).find(["x", "".join(text)])] == positions


def test_folding_makes_case_width_and_spaces_equal() -> None:
    assert folded("  \uff22\uff41D\n\tStra\xdfe ") == "bad strasse"


def test_lists_leave_out_empty_lines_and_characters_may_be_code_points(tmp_path: Path) -> None:
    file = tmp_path / "list.txt"
    file.write_text("\ufeffone \n\n two\nU+000A\n", encoding="utf-8")
    assert read_list(file) == ["one", "two", "U+000A"]
    file.write_text("!\nU+000A\n", encoding="utf-8")
    assert read_characters(file) == {"!", "\n"}


@dataclass(frozen=True)
class _Lists:
    files: tuple[Path, ...] = ()
    file: Path | None = None


def test_a_list_that_is_missing_or_not_utf_8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"\xe9\xff")
    require_files(_Lists())
    for config in (_Lists(files=(tmp_path / "none.txt",)), _Lists(file=tmp_path / "latin.txt")):
        with pytest.raises(DataError, match="the list cannot be read"):
            require_files(config)
