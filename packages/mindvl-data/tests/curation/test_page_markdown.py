# SPDX-License-Identifier: Apache-2.0
"""Markdown from lines: headings, lists, paragraphs, tables."""

from mindvl_data.curation.page_layout import Block, Line, Table
from mindvl_data.curation.page_markdown import Sizes, font_sizes, table_markdown, to_markdown
from mindvl_data.curation.pdf import Figure

SIZES = Sizes(10.0, (20.0, 14.0))


def lines(*texts: str, size: float = 10.0, y: float = 100.0, right: float = 400.0) -> list[Block]:
    return [
        Line(
            text,
            72,
            y + 1.3 * size * index,
            72 + size / 2 * len(text),
            y + 1.3 * size * index + 1.2 * size,
            size,
            right,
        )
        for index, text in enumerate(texts)
    ]


def markdown(blocks: list[Block], words: set[str] | None = None) -> list[str | Figure]:
    return to_markdown(blocks, SIZES, words or set())


def test_the_body_has_the_font_size_of_most_characters_and_larger_ones_are_headings() -> None:
    found = [
        *lines("T", size=20.1),
        *lines("a long line of text", size=9.9),
        *lines("Head", size=14),
        *lines("fo", size=8),
    ]
    assert font_sizes([one for one in found if isinstance(one, Line)]) == Sizes(10.0, (20.0, 14.0))


def test_headings_have_the_level_of_their_size() -> None:
    blocks = [*lines("Title", size=20, y=50), *lines("Section", size=14, y=100), *lines("Text.", y=140)]
    assert markdown(blocks) == ["# Title\n\n## Section\n\nText."]


def test_lines_of_a_paragraph_are_joined_and_an_early_end_of_a_line_stays() -> None:
    full = "this line is filled up to the right edge of its column, really"  # 310 points
    assert markdown(lines(full, "and continues here", right=385)) == [f"{full} and continues here"]
    assert markdown(lines("first verse", "second verse", right=385)) == ["first verse\nsecond verse"]


def test_list_items_follow_each_other() -> None:
    assert markdown(lines("Items:", "\u2022 one", "- two", "1. first", "(2) second")) == [
        "Items:\n\n- one\n- two\n1. first\n2. second"
    ]


def test_a_word_divided_by_a_line_end_is_joined_as_elsewhere_in_the_document() -> None:
    blocks = lines("a well-", "known para-", "graph", right=110)
    assert markdown(blocks, {"well-known"}) == ["a well-known paragraph"]


def test_a_table_is_written_with_a_header_and_escaped_bars() -> None:
    assert table_markdown([["a", "b|c"], ["1", "2\n3"]]) == "| a | b\\|c |\n| --- | --- |\n| 1 | 2 3 |"
    assert markdown([Table((("a", "b"), ("1", "2")))]) == ["| a | b |\n| --- | --- |\n| 1 | 2 |"]


def test_figures_divide_the_text() -> None:
    figure = Figure(b"x", 0, 0, 1, 1)
    assert markdown([figure, *lines("between"), figure]) == [figure, "between", figure]
