# SPDX-License-Identifier: Apache-2.0
"""Coverage of characters and words, and rendered supplements."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from numpy.typing import NDArray

from mindvl_data.curation.coverage import (
    WIDTH,
    RenderRareConfig,
    TextCoverageConfig,
    decide_coverage,
    items_of,
    render_rare,
    sign_coverage,
)
from mindvl_data.curation.record import Record
from mindvl_data.curation.step import Context, Decision


class Table:
    """Signatures in memory, in blocks of one record."""

    width = WIDTH

    def __init__(self, rows: list[tuple[Record, NDArray[np.uint8]]]) -> None:
        self._rows, self.num_rows = rows, sum(len(one) for _, one in rows)

    def blocks(self) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.uint32], NDArray[np.uint8]]]:
        for record, one in self._rows:
            yield np.full(len(one), record.number, np.uint64), np.full(len(one), record.piece, np.uint32), one


def decided(texts: list[str], config: TextCoverageConfig, directory: Path) -> list[Decision]:
    records = [Record(number=3 + number, id=str(number), body={"content": text}) for number, text in enumerate(texts)]
    context = Context(seed=0, cache=directory)
    signed = sign_coverage(records, config, context)
    return list(decide_coverage(Table(list(zip(records, signed, strict=True))), config, context, directory))


def font_with(path: Path, characters: str) -> Path:
    names = [".notdef", *(f"u{ord(character):04x}" for character in characters)]
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder(names)
    builder.setupCharacterMap({ord(character): name for character, name in zip(characters, names[1:], strict=True)})
    builder.setupGlyf(dict.fromkeys(names, TTGlyphPen(None).glyph()))
    builder.setupHorizontalMetrics(dict.fromkeys(names, (500, 0)))
    builder.setupHorizontalHeader()
    builder.setupPost()
    builder.save(path)
    return path


def test_characters_and_words_of_a_text_are_counted_once() -> None:
    assert items_of("Ab ab a \u4e2d\u4e2d") == {b"cA", b"cb", b"ca", b"c\xe4\xb8\xad", b"wab"}


def test_rare_characters_are_noted_at_the_first_record_with_the_number_that_is_missing(tmp_path: Path) -> None:
    decisions = decided(["ab", "abc", "ab"], TextCoverageConfig(min_character_count=3), tmp_path)
    assert decisions == [Decision(4, 0, facts={"rare_items": ["c"], "rare_missing": [2]})]
    summary = json.loads((tmp_path / "coverage.json").read_text())
    assert (summary["characters"], summary["rare_characters"], summary["expected_covered"]) == (3, 1, None)


def test_rare_words_and_expected_items_that_no_record_contains_are_noted(tmp_path: Path) -> None:
    expected = tmp_path / "expected.txt"
    expected.write_text("ab x Zoo")
    config = TextCoverageConfig(min_character_count=0, min_word_count=2, expected=expected)
    decisions = decided(["ab cd", "ab"], config, tmp_path)
    assert decisions == [Decision(3, 0, facts={"rare_items": ["x", "cd", "zoo"], "rare_missing": [1, 1, 2]})]
    assert json.loads((tmp_path / "coverage.json").read_text())["expected_covered"] == 0.3333


def test_the_number_of_noted_items_is_limited_to_the_most_frequent(tmp_path: Path) -> None:
    config = TextCoverageConfig(min_character_count=3, max_items=1)
    assert decided(["ab", "b"], config, tmp_path) == [Decision(3, 0, facts={"rare_items": ["b"], "rare_missing": [1]})]


def test_nothing_is_noted_without_records(tmp_path: Path) -> None:
    assert decided([], TextCoverageConfig(), tmp_path) == []


def test_each_rare_item_is_rendered_as_often_as_it_is_missing(tmp_path: Path) -> None:
    path = font_with(tmp_path / "f.ttf", "abc")
    record = Record(number=1, id="r", body={"content": "text"}).with_facts(
        rare_items=["a", "b", "c", "\u4e2d"], rare_missing=[3, 1, 1, 5]
    )
    config = RenderRareConfig(fonts=(path,), items_per_image=2)
    (made,) = render_rare([record], config, Context(seed=0, cache=tmp_path))
    assert isinstance(made, list)
    original, *rendered = made
    assert original.body == record.body
    assert original.facts["rare_without_glyph"] == ["\u4e2d"]
    assert [sorted(one.answers()[0].split()) for one in rendered] == [["a", "b"], ["a", "c"], ["a"]]
    assert all(one.facts == {"rendered_rare": True} for one in rendered)


def test_records_without_rare_items_stay_as_they_are(tmp_path: Path) -> None:
    record = Record(number=1, id="r", body={"content": "text"})
    config = RenderRareConfig(fonts=(font_with(tmp_path / "f.ttf", "a"),))
    assert render_rare([record], config, Context(seed=0, cache=tmp_path)) == [record]
