# SPDX-License-Identifier: Apache-2.0
"""Rendered text: images, line ends, fonts without a glyph."""

from pathlib import Path

import numpy as np
import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from PIL import ImageFont

from mindvl_data.curation.record import Record
from mindvl_data.curation.rendering import RenderConfig, background, divided, render_text, wrapped
from mindvl_data.curation.step import Context, Drop

ZHONG, WEN = "\u4e2d", "\u6587"


def font_with(path: Path, characters: str) -> Path:
    """A font in which every one of these characters is a black square."""
    names = {character: f"u{ord(character):04x}" for character in characters}
    pen = TTGlyphPen(None)
    for point, move in zip(
        [(100, 0), (900, 0), (900, 800), (100, 800)], [pen.moveTo, pen.lineTo, pen.lineTo, pen.lineTo], strict=True
    ):
        move(point)
    pen.closePath()
    square, empty = pen.glyph(), TTGlyphPen(None).glyph()
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder([".notdef", "space", *names.values()])
    builder.setupCharacterMap({ord(" "): "space"} | {ord(character): name for character, name in names.items()})
    builder.setupGlyf({".notdef": empty, "space": empty} | dict.fromkeys(names.values(), square))
    builder.setupHorizontalMetrics(dict.fromkeys([".notdef", "space", *names.values()], (1000, 0)))
    builder.setupHorizontalHeader(ascent=900, descent=-100)
    builder.setupOS2()
    builder.setupNameTable({"familyName": "Squares", "styleName": "Regular"})
    builder.setupPost()
    builder.save(path)
    return path


def text_record(text: str) -> Record:
    return Record(number=5, id="t.txt", body={"content": text})


def run(text: str, config: RenderConfig, directory: Path, seed: int = 1) -> Drop | list[Record]:
    (outcome,) = render_text([text_record(text)], config, Context(seed=seed, cache=directory))
    assert not isinstance(outcome, Record)
    return outcome


def test_a_text_becomes_an_image_whose_answer_has_the_line_ends_of_the_image(tmp_path: Path) -> None:
    path = font_with(tmp_path / "f.ttf", "abcdefg")
    config = RenderConfig(fonts=(path,), min_size=40, max_size=40, min_width=400, max_width=400)
    made = run("abc de fg", config, tmp_path)
    assert isinstance(made, list)
    (record,) = made
    # At most 9 squares of 40 pixels fit into 400 pixels with margins of at least 20 pixels.
    assert record.answers()[0].replace("\n", " ") == "abc de fg"
    assert all(len(line) <= 9 for line in record.answers()[0].split("\n"))
    image = record.image()
    assert image.shape[1] == 400
    assert np.ptp(image.mean(axis=2)) > 60  # text is visible on the background


def test_chinese_text_needs_a_font_with_its_characters(tmp_path: Path) -> None:
    one, both = font_with(tmp_path / "one.ttf", ZHONG), font_with(tmp_path / "both.ttf", ZHONG + WEN)
    dropped = run(ZHONG + WEN, RenderConfig(fonts=(one,)), tmp_path)
    assert dropped == Drop("missing_glyphs", WEN)
    made = run(ZHONG + WEN, RenderConfig(fonts=(one, both)), tmp_path)
    assert isinstance(made, list)
    assert made[0].answers() == [ZHONG + WEN]
    assert not made[0].texts()[0].isascii()  # the prompt is Chinese too
    assert run(" ", RenderConfig(fonts=(one,)), tmp_path) == Drop("no_text")


def test_equal_seeds_give_equal_images_and_other_seeds_others(tmp_path: Path) -> None:
    config = RenderConfig(fonts=(font_with(tmp_path / "f.ttf", "abc"),))
    first, again, other = (run("abc " * 30, config, tmp_path, seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_long_texts_are_divided_between_words() -> None:
    assert divided("one two three four", 9) == ["one two", "three", "four"]
    assert divided("abcdefgh", 3) == ["abc", "def", "gh"]
    assert divided("  ", 3) == []


def test_lines_are_broken_between_words_and_between_wide_characters(tmp_path: Path) -> None:
    face = ImageFont.truetype(
        str(font_with(tmp_path / "f.ttf", "abcde" + ZHONG + WEN)), 10
    )  # every character is 10 wide
    assert wrapped("ab cd abcde", face, 50) == ["ab cd", "abcde"]
    assert wrapped((ZHONG + WEN) * 3, face, 40) == [(ZHONG + WEN) * 2, ZHONG + WEN]
    assert wrapped("abcdeabcde", face, 50) == ["abcde", "abcde"]
    assert wrapped("a\n\nb", face, 50) == ["a", "b"]


def test_backgrounds_vary_with_the_seed() -> None:
    context, record = Context(seed=0, cache=Path("unused")), text_record("x")
    images = [background(60, 40, context.random(record, str(index))) for index in range(8)]
    assert all(image.shape == (40, 60, 3) for image in images)
    assert len({image.tobytes() for image in images}) == 8


@pytest.mark.parametrize("wrong", [{"min_size": 50}, {"min_width": 100}, {"max_characters": 0}])
def test_parameters_outside_their_range_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        RenderConfig(**wrong)  # type: ignore[arg-type]
