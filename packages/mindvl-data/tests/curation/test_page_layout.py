# SPDX-License-Identifier: Apache-2.0
"""Reading order of one and two columns, tables, and lines from words."""

from mindvl_data.curation.page_layout import Line, Table, join_words, reading_order
from mindvl_data.curation.pdf import Figure, Word


def line(text: str, x: float, y: float, width: float = 200) -> Line:
    return Line(text, x, y, x + width, y + 12, 10)


def texts(blocks: list) -> list[str]:  # type: ignore[type-arg]
    return [block.text if isinstance(block, Line) else type(block).__name__ for block in blocks]


def word(text: str, x: float, y: float = 100.0) -> Word:
    return Word(text, x, y, x + 5 * len(text), y + 12, 10)


def test_words_on_a_line_are_joined_and_a_wide_gap_divides_the_line() -> None:
    lines = join_words([word("one", 72), word("two", 90), word("far", 200), word("below", 72, 115)])
    assert [found.text for found in lines] == ["one two", "far", "below"]


def test_words_of_a_line_are_joined_in_any_order_of_the_file() -> None:
    lines = join_words([word("two", 90), word("below", 72, 115), word("one", 72)])
    assert [found.text for found in lines] == ["one two", "below"]


def test_adjacent_chinese_words_are_joined_without_a_space() -> None:
    words = [Word("\u4e2d\u6587", 72, 100, 92, 112, 10), Word("\u5b57", 92.5, 100, 102, 112, 10)]
    assert [found.text for found in join_words(words)] == ["\u4e2d\u6587\u5b57"]


def test_the_left_column_is_read_before_the_right_one_between_lines_across_both() -> None:
    lines = [line("title", 72, 50, 430), line("foot", 72, 300, 430)]
    for index in range(4):
        lines += [line(f"R{index}", 310, 100 + 15 * index), line(f"L{index}", 72, 100 + 15 * index)]
    assert texts(reading_order(lines)) == ["title", "L0", "L1", "L2", "L3", "R0", "R1", "R2", "R3", "foot"]


def test_one_column_is_read_from_top_to_bottom_with_figures() -> None:
    lines = [line(f"{index}", 72, 100 + 15 * index, 400) for index in range(8)]
    figure = Figure(b"", 72, 131, 200, 144)  # beside the lines 1 and 2, its center below that of line 2
    assert texts(reading_order(lines[::-1], [figure])) == ["0", "1", "2", "Figure", "3", "4", "5", "6", "7"]


def test_rows_of_aligned_cells_become_a_table_and_a_wrapped_cell_is_joined() -> None:
    lines = [line("before", 72, 60, 400)]
    for index, (name, value) in enumerate([("Name", "Value"), ("alpha", "1"), ("beta", "2 and")]):
        lines += [line(name, 72, 100 + 15 * index, 50), line(value, 200, 100 + 15 * index, 60)]
    lines += [line("more", 200, 145, 40), line("after", 72, 200, 400)]
    before, table, after = reading_order(lines)
    assert table == Table((("Name", "Value"), ("alpha", "1"), ("beta", "2 and more")))
    assert isinstance(before, Line)
    assert isinstance(after, Line)
    assert (before.text, after.text) == ("before", "after")


def test_cells_that_are_not_aligned_stay_lines() -> None:
    lines = [line("a", 72, 100, 50), line("b", 200, 100, 50), line("c", 100, 115, 50), line("d", 160, 115, 200)]
    assert all(isinstance(block, Line) for block in reading_order(lines))
