# SPDX-License-Identifier: Apache-2.0
"""Words and figures of a page -> blocks in reading order: lines, tables and figures, in one or two columns.

Comes after pdf.py and before page_markdown.py. Only positions and font sizes are used, so that the result does not depend
on the order in which a PDF stores its text, except that words of a line that follow each other in the file are joined first.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from mindvl_data.curation.pdf import Figure, Word

_WORD_GAP = 1.2  # a larger gap between words, in font sizes, separates columns or cells
_GUTTER_RANGE = (0.3, 0.7)  # where the gap between two columns is searched, in widths of the text area
_COLUMN_FILLED = 0.5  # median width of the lines of a column, in widths of the column; cells of tables are narrower
_SPANNING = 0.4  # a page of two columns has at most this share of its height in lines across both
_MIN_COLUMN_LINES = 3
_MAX_MERGED = 4000  # pages with more segments are not merged, because the time is quadratic


@dataclass(frozen=True)
class Line:
    """A part of a line without large gaps. Coordinates in points from the upper left corner."""

    text: str
    x0: float
    y0: float
    x1: float
    y1: float
    size: float
    right: float = math.inf  # right edge of its column

    @property
    def middle(self) -> float:
        """Vertical center."""
        return (self.y0 + self.y1) / 2


@dataclass(frozen=True)
class Table:
    """Cells by row and column; every row has the same number of cells."""

    rows: tuple[tuple[str, ...], ...]


Block = Line | Table | Figure


def join_words(words: Sequence[Word]) -> list[Line]:
    """Join words to lines; a large horizontal gap separates lines."""
    lines: list[Line] = []
    for word in words:
        new = Line(word.text, word.x0, word.y0, word.x1, word.y1, word.size)
        if lines and _continues(lines[-1], new):
            lines[-1] = _joined(lines[-1], new)
        else:
            lines.append(new)
    return lines if len(lines) > _MAX_MERGED else _merged(lines)


def reading_order(lines: Sequence[Line], figures: Sequence[Figure] = (), *, tables: bool = True) -> list[Block]:
    """Put lines and figures of a page into reading order: top to bottom, in two columns the left one first.

    A line across both columns (a title, a wide figure) divides the page: what is above it is read before. With `tables`, rows
    of aligned cells become a Table.
    """
    items: list[Line | Figure] = [*lines, *figures]
    gutter = _gutter(lines)
    if gutter is None:
        return _blocks(items, tables)
    ordered: list[Block] = []
    left: list[Line | Figure] = []
    right: list[Line | Figure] = []
    for item in sorted(items, key=lambda item: ((item.y0 + item.y1) / 2, item.x0)):
        if item.x1 <= gutter:
            left.append(item)
        elif item.x0 >= gutter:
            right.append(item)
        else:
            ordered += [*_blocks(left, tables), *_blocks(right, tables), *_blocks([item], tables)]
            left, right = [], []
    return [*ordered, *_blocks(left, tables), *_blocks(right, tables)]


def _continues(line: Line, word: Line) -> bool:
    size = max(line.size, word.size)
    overlap = min(line.y1, word.y1) - max(line.y0, word.y0)
    gap = word.x0 - line.x1
    return overlap > 0.5 * min(line.y1 - line.y0, word.y1 - word.y0) and -0.5 * size <= gap <= _WORD_GAP * size


def _joined(line: Line, word: Line) -> Line:
    # Characters of Chinese, Japanese and Korean are words of their own without a space between them.
    space = "" if is_wide(line.text[-1]) and is_wide(word.text[0]) and word.x0 - line.x1 < 0.3 * line.size else " "
    return Line(
        line.text + space + word.text,
        min(line.x0, word.x0),
        min(line.y0, word.y0),
        max(line.x1, word.x1),
        max(line.y1, word.y1),
        line.size if len(line.text) >= len(word.text) else word.size,
    )


def is_wide(character: str) -> bool:
    """True for characters that are written without spaces between words: Chinese, Japanese, full-width punctuation."""
    code = ord(character)
    return (
        0x2E80 <= code <= 0x30FF
        or 0x3400 <= code <= 0x4DBF
        or 0x4E00 <= code <= 0x9FFF
        or 0xF900 <= code <= 0xFAFF
        or 0xFF00 <= code <= 0xFF60
        or 0x20000 <= code <= 0x3FFFF
    )


def _merged(lines: Iterable[Line]) -> list[Line]:
    """Join parts of a line that do not follow each other in the file."""
    merged: list[Line] = []
    for line in sorted(lines, key=lambda line: (line.x0, line.y0)):
        for index in range(len(merged) - 1, -1, -1):
            if _continues(merged[index], line):
                merged[index] = _joined(merged[index], line)
                break
        else:
            merged.append(line)
    return sorted(merged, key=lambda line: (line.middle, line.x0))


def _gutter(lines: Sequence[Line]) -> float | None:
    """The horizontal position of the gap between two columns; None for a page of one column."""
    if len(lines) < 2 * _MIN_COLUMN_LINES:
        return None
    left, right = min(line.x0 for line in lines), max(line.x1 for line in lines)
    low, high = (left + share * (right - left) for share in _GUTTER_RANGE)
    ends = sorted({line.x1 for line in lines if low <= line.x1 <= high})
    total = sum(line.y1 - line.y0 for line in lines)
    best: tuple[float, float] | None = None  # (height of crossing lines, position)
    for end in ends:
        starts = [line.x0 for line in lines if line.x0 > end]
        if not starts:
            continue
        position = (end + min(starts)) / 2
        crossing = sum(line.y1 - line.y0 for line in lines if line.x0 < position < line.x1)
        if best is None or crossing < best[0]:
            best = crossing, position
    if best is None or best[0] > _SPANNING * total:
        return None
    position = best[1]
    sides = [line for line in lines if line.x1 <= position], [line for line in lines if line.x0 >= position]
    for side in sides:
        if len(side) < _MIN_COLUMN_LINES:
            return None
        start, stop = min(line.x0 for line in side), max(line.x1 for line in side)
        wide = 0.25 * (right - left)  # a narrow column is one of a table, or numbers in the margin
        if stop - start < wide or statistics.median(line.x1 - line.x0 for line in side) < _COLUMN_FILLED * (
            stop - start
        ):
            return None
    beside = min(max(line.y1 for line in side) for side in sides) - max(min(line.y0 for line in side) for side in sides)
    return position if beside > 0 else None


def _blocks(items: Sequence[Line | Figure], tables: bool) -> list[Block]:
    """Blocks of one column, from top to bottom."""
    blocks: list[Block] = []
    rows: list[list[Line]] = []
    right = max((item.x1 for item in items if isinstance(item, Line)), default=math.inf)
    placed = [replace(item, right=right) if isinstance(item, Line) else item for item in items]
    for item in sorted(placed, key=lambda item: ((item.y0 + item.y1) / 2, item.x0)):
        if isinstance(item, Figure):
            blocks += _with_tables(rows) if tables else _lines_of(rows)
            blocks.append(item)
            rows = []
        elif rows and abs(rows[-1][0].middle - item.middle) < 0.5 * min(
            item.y1 - item.y0, rows[-1][0].y1 - rows[-1][0].y0
        ):
            rows[-1].append(item)
        else:
            rows.append([item])
    return blocks + (_with_tables(rows) if tables else _lines_of(rows))


def _lines_of(rows: Sequence[list[Line]]) -> list[Line]:
    return [line for row in rows for line in sorted(row, key=lambda line: line.x0)]


def _with_tables(rows: Sequence[list[Line]]) -> list[Block]:
    """Replace consecutive rows of aligned cells by tables."""
    blocks: list[Block] = []
    start = 0
    while start < len(rows):
        stop = start
        while stop < len(rows) and (len(rows[stop]) > 1 or (stop > start and _wraps(rows, start, stop))):
            stop += 1
        while stop > start and len(rows[stop - 1]) == 1 and not _wraps(rows, start, stop - 1):
            stop -= 1
        table = _table(rows[start:stop])
        if table is not None:
            blocks.append(table)
            start = stop
        else:
            stop = max(stop, start + 1)
            blocks += _lines_of(rows[start:stop])
            start = stop
    return blocks


def _wraps(rows: Sequence[list[Line]], start: int, index: int) -> bool:
    """True if the only line of a row continues a cell of the row above, in any column except the first."""
    line, above = rows[index][0], rows[index - 1]
    close = line.y0 - max(cell.y1 for cell in above) < 0.5 * line.size
    first = min(cell.x1 for row in rows[start:index] for cell in row if cell.x0 == min(other.x0 for other in row))
    starts = [cell.x0 for row in rows[start:index] for cell in row if cell.x0 > first]
    return close and any(abs(line.x0 - x0) < line.size for x0 in starts)


def _table(rows: Sequence[list[Line]]) -> Table | None:
    """The table that the rows form; None if their cells are not aligned."""
    if len(rows) < 2:
        return None
    columns: list[tuple[float, float]] = []
    for x0, x1 in sorted((cell.x0, cell.x1) for row in rows for cell in row):
        if columns and x0 < columns[-1][1]:
            columns[-1] = columns[-1][0], max(columns[-1][1], x1)
        else:
            columns.append((x0, x1))
    if len(columns) < 2 or len(rows) * len(columns) < 6:
        return None
    filled: list[list[str]] = []
    for row in rows:
        cells = [""] * len(columns)
        for cell in sorted(row, key=lambda cell: cell.x0):
            index = next(index for index, (x0, x1) in enumerate(columns) if x0 <= cell.x0 <= x1)
            if cells[index]:
                return None
            cells[index] = cell.text
        if len(row) == 1 and filled:  # the rest of a cell of the row above
            filled[-1] = [f"{above} {cell}".strip() for above, cell in zip(filled[-1], cells, strict=True)]
        else:
            filled.append(cells)
    return Table(tuple(tuple(row) for row in filled)) if len(filled) > 1 else None
