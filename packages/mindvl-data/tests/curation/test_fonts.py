# SPDX-License-Identifier: Apache-2.0
"""Which font can show which text."""

import importlib.util
from pathlib import Path

import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen

from mindvl_data.curation.fonts import characters_of, font_files, missing_characters, usable_fonts
from mindvl_data.curation.step import Context
from mindvl_data.errors import DataError


def font_with(path: Path, characters: str) -> str:
    """A font with empty glyphs for these characters."""
    names = [".notdef", *(f"u{ord(character):04x}" for character in characters)]
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder(names)
    builder.setupCharacterMap({ord(character): name for character, name in zip(characters, names[1:], strict=True)})
    builder.setupGlyf(dict.fromkeys(names, TTGlyphPen(None).glyph()))
    builder.setupHorizontalMetrics(dict.fromkeys(names, (500, 0)))
    builder.setupHorizontalHeader()
    builder.setupPost()
    builder.save(path)
    return str(path)


def test_characters_without_a_glyph_are_named(tmp_path: Path) -> None:
    context = Context(seed=0, cache=tmp_path)
    narrow, wide = font_with(tmp_path / "a.ttf", "ab"), font_with(tmp_path / "b.ttf", "abcd")
    assert characters_of(narrow, context) == {ord("a"), ord("b")}
    assert missing_characters("bad dab c", narrow, context) == "cd"
    assert usable_fonts("abc", [narrow, wide], context) == ([wide], "")
    assert usable_fonts("abcxyz", [narrow, wide], context) == ([], "xyz")


def test_files_that_are_missing_or_no_fonts_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        font_files([str(tmp_path / "none.ttf")])
    (tmp_path / "text.ttf").write_text("no font")
    with pytest.raises(DataError, match="is not a font"):
        characters_of(str(tmp_path / "text.ttf"), Context(seed=0, cache=tmp_path))


@pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib, which contains DejaVu, is not installed"
)
def test_the_fonts_of_matplotlib_show_latin_and_no_chinese(tmp_path: Path) -> None:
    context = Context(seed=0, cache=tmp_path)
    usable, _ = usable_fonts("Gr\u00fc\u00dfe, \u0434\u0430", font_files(()), context)
    assert usable == font_files(())
    assert usable_fonts("\u4e2d", font_files(()), context) == ([], "\u4e2d")
