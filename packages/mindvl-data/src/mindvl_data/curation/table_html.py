# SPDX-License-Identifier: Apache-2.0
"""Tables as a grid of cells: from HTML, Markdown or CSV, checked, and written as plain HTML. B.1.3.

Used by tables.py. Only the structure and simple formatting of cells survive; scripts, styles and attributes do not.
"""

import csv
import html
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html.parser import HTMLParser

MAX_SPAN = 1000
MAX_CELLS = 20_000
_KEPT = ("b", "i", "sub", "sup")
_AS_KEPT = {"strong": "b", "em": "i"}
_SILENT = ("script", "style", "template", "noscript", "iframe", "object", "svg", "math", "head", "title")
_SEPARATOR = re.compile(r"^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$")


class TableError(Exception):
    """A table that is not valid.

    Attributes:
        reason: Reason code of the step `table_html`.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Cell:
    """A cell. `content` is HTML with b, i, sub, sup and br only."""

    content: str
    is_header: bool = False
    rowspan: int = 1
    colspan: int = 1

    @property
    def text(self) -> str:
        """Content without formatting."""
        return html.unescape(re.sub(r"<[^>]*>", "", self.content.replace("<br>", "\n")))


Rows = tuple[tuple[Cell, ...], ...]


def from_html(text: str) -> Rows:
    """Rows of the only table in an HTML text.

    Raises:
        TableError: There is no table, several, or one in another.
    """
    parser = _TableParser()
    parser.feed(text)
    parser.close()
    if parser.num_tables != 1:
        raise TableError("no_table", f"{parser.num_tables} tables")
    parser.end_cell()
    return tuple(tuple(row) for row in parser.rows if row)


def from_markdown(text: str) -> Rows:
    """Rows of a table in the syntax of GitHub; the row before the separator is the header.

    Raises:
        TableError: The text is not such a table.
    """
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    if len(lines) < 2 or not _SEPARATOR.match(lines[1]) or "|" not in lines[0]:
        raise TableError("no_table", "no header and separator")
    rows = [_markdown_cells(line) for line in [lines[0], *lines[2:]]]
    return _plain(rows)


def from_csv(text: str) -> Rows:
    """Rows of comma- or tab-separated values; the first one is the header.

    Raises:
        TableError: The text is not such a table.
    """
    delimiter = "\t" if text.split("\n", 1)[0].count("\t") else ","
    try:
        rows = [row for row in csv.reader(io.StringIO(text.strip()), delimiter=delimiter, strict=True) if row]
    except csv.Error as error:
        raise TableError("no_table", str(error)) from error
    if len(rows) < 2 or len(rows[0]) < 2:
        raise TableError("no_table", "fewer than two rows or columns")
    return _plain(rows)


def from_text(text: str) -> Rows:
    """Rows of a table in any of the three formats."""
    if re.search(r"<table\b", text, re.IGNORECASE):
        return from_html(text)
    lines = text.strip().splitlines()
    return from_markdown(text) if len(lines) > 1 and _SEPARATOR.match(lines[1]) else from_csv(text)


def check_grid(rows: Rows) -> tuple[int, int]:
    """Number of rows and columns of the grid that the cells fill completely and without overlap.

    Raises:
        TableError: They do not, or the table is empty or too large.
    """
    if not rows or not any(cell.text.strip() for row in rows for cell in row):
        raise TableError("empty_table", "no cell with text")
    taken: dict[tuple[int, int], int] = {}
    for index, row in enumerate(rows):
        column = 0
        for number, cell in enumerate(row):
            while (index, column) in taken:
                column += 1
            if len(taken) + cell.rowspan * cell.colspan > MAX_CELLS:
                raise TableError("too_large", f"more than {MAX_CELLS} cells")
            for place in [(index + y, column + x) for y in range(cell.rowspan) for x in range(cell.colspan)]:
                if place in taken:
                    raise TableError("inconsistent_grid", f"two cells at row {place[0] + 1}, column {place[1] + 1}")
                taken[place] = number
            column += cell.colspan
    num_rows, num_columns = (1 + max(place[axis] for place in taken) for axis in (0, 1))
    if num_rows != len(rows):
        raise TableError("inconsistent_grid", f"a rowspan reaches row {num_rows} of {len(rows)}")
    if len(taken) != num_rows * num_columns:
        place = next((y, x) for y in range(num_rows) for x in range(num_columns) if (y, x) not in taken)
        raise TableError("inconsistent_grid", f"no cell at row {place[0] + 1}, column {place[1] + 1}")
    return num_rows, num_columns


def to_html(rows: Rows) -> str:
    """Plain HTML; leading rows of header cells are the head."""
    head = 0
    while head < len(rows) and all(cell.is_header for cell in rows[head]):
        head += 1
    parts = ["<table>"]
    for tag, group in (("thead", rows[:head]), ("tbody", rows[head:])):
        if group:
            parts += [f"<{tag}>", *("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in group), f"</{tag}>"]
    return "".join([*parts, "</table>"])


def texts_of(rows: Rows) -> list[list[str]]:
    """Texts of a table without spans."""
    return [[cell.text.strip() for cell in row] for row in rows]


def _plain(rows: Sequence[Sequence[str]]) -> Rows:
    return tuple(
        tuple(Cell(html.escape(cell.strip(), quote=False), is_header=index == 0) for cell in row)
        for index, row in enumerate(rows)
    )


def _markdown_cells(line: str) -> list[str]:
    cells = re.split(r"(?<!\\)\|", line)
    cells = cells[1:] if not cells[0].strip() else cells
    cells = cells[:-1] if cells and not cells[-1].strip() else cells
    return [re.sub(r"<br\s*/?>", "\n", cell.replace("\\|", "|")).strip() for cell in cells]


def _cell(cell: Cell) -> str:
    tag = "th" if cell.is_header else "td"
    spans = "".join(
        f' {name}="{value}"' for name, value in (("rowspan", cell.rowspan), ("colspan", cell.colspan)) if value > 1
    )
    return f"<{tag}{spans}>{cell.content}</{tag}>"


class _TableParser(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.rows: list[list[Cell]] = []
        self.num_tables = 0
        self._in_table = self._in_head = False
        self._content: list[str] | None = None
        self._open: list[str] = []
        self._current = Cell("")
        self._silent = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _SILENT:
            self._silent += 1
        elif tag == "table":
            if self._in_table:
                raise TableError("nested_table", "a table in a table")
            self.num_tables, self._in_table = self.num_tables + 1, True
        elif not self._in_table or self._silent:
            return
        elif tag == "thead":
            self._in_head = True
        elif tag == "tr":
            self.end_cell()
            self.rows.append([])
        elif tag in ("td", "th"):
            self.end_cell()
            if not self.rows:
                self.rows.append([])
            spans = [_span(dict(attrs).get(name)) for name in ("rowspan", "colspan")]
            self._current = Cell("", tag == "th" or self._in_head, *spans)
            self._content = []
        elif self._content is not None and tag == "br":
            self._content.append("<br>")
        elif self._content is not None and _AS_KEPT.get(tag, tag) in _KEPT:
            self._open.append(_AS_KEPT.get(tag, tag))
            self._content.append(f"<{self._open[-1]}>")

    def handle_endtag(self, tag: str) -> None:
        if tag in _SILENT:
            self._silent = max(0, self._silent - 1)
        elif tag in ("td", "th", "tr", "table", "thead", "tbody"):
            self.end_cell()
            self._in_head = self._in_head and tag not in ("thead", "table", "tbody")
            self._in_table = self._in_table and tag != "table"
        elif self._content is not None and self._open and self._open[-1] == _AS_KEPT.get(tag, tag):
            self._content.append(f"</{self._open.pop()}>")

    def handle_data(self, data: str) -> None:
        if self._content is not None and not self._silent:
            self._content.append(html.escape(data, quote=False))

    def end_cell(self) -> None:
        """Close the cell that is open, and the formatting in it."""
        if self._content is None:
            return
        self._content += [f"</{tag}>" for tag in reversed(self._open)]
        content = re.sub(r"\s+", " ", "".join(self._content)).strip()
        cell = self._current
        self.rows[-1].append(Cell(content, cell.is_header, cell.rowspan, cell.colspan))
        self._content, self._open = None, []


def _span(value: str | None) -> int:
    number = int(value) if value is not None and re.fullmatch(r"\s*\d{1,6}\s*", value) else 1
    if number > MAX_SPAN:
        raise TableError("too_large", f"a span of {number}")
    return max(number, 1)
