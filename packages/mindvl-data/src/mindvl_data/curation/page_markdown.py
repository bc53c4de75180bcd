# SPDX-License-Identifier: Apache-2.0
"""Lines of all pages of a document -> Markdown with headings, lists, paragraphs and tables, and figures between the texts.

Comes after page_layout.py and document_rules.py; documents.py makes records from the result.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mindvl_data.curation.document_rules import clean_text, join_hyphens, without_repeated_lines, words_of
from mindvl_data.curation.page_layout import Block, Line, Table, is_wide, join_words, reading_order
from mindvl_data.curation.pdf import Figure, Page

_HEADING = 1.15  # font size of headings, in font sizes of the body
_HEADING_LEVELS = 3
_MAX_HEADING = 200  # characters; longer text in a large font is not a heading
_NEW_PARAGRAPH = 0.75  # space between two lines of different paragraphs, in font sizes
_HARD = "\x1e"  # a line end that stays
_BULLET = re.compile("^[\u2022\u2023\u25aa\u25cf\u25cb\u25e6\u2043\u2219\uf0b7*\u2013-]\\s+(?=\\S)")
_NUMBER = re.compile(r"^(?:\((\d{1,3})\)|(\d{1,3})[.)])\s+(?=\S)")


@dataclass(frozen=True)
class Sizes:
    """Font sizes of a document: that of the body, and those of headings, largest first."""

    body: float
    headings: tuple[float, ...]


def document_blocks(pages: Sequence[Page]) -> tuple[list[list[Block]], Sizes, set[str]]:
    """Blocks of each page in reading order, without repeated headers and footers; font sizes; words of the document."""
    lines = without_repeated_lines([(page.height, join_words(page.words)) for page in pages])
    words = words_of("\n".join(line.text for page in lines for line in page))
    ordered = [reading_order(found, page.figures) for found, page in zip(lines, pages, strict=True)]
    return ordered, font_sizes([line for page in lines for line in page]), words


def font_sizes(lines: Sequence[Line]) -> Sizes:
    """The most frequent font size by characters is the body; clearly larger ones are headings."""
    counts: Counter[float] = Counter()
    for line in lines:
        counts[_rounded(line.size)] += len(line.text)
    if not counts:
        return Sizes(0.0, ())
    body = max(counts, key=lambda size: (counts[size], size))
    larger = sorted((size for size in counts if size >= _HEADING * body), reverse=True)
    return Sizes(body, tuple(larger))


def to_markdown(blocks: Sequence[Block], sizes: Sizes, words: set[str]) -> list[str | Figure]:
    """Markdown of consecutive blocks, with figures at their places."""
    parts: list[str | Figure] = []
    texts: list[str] = []
    paragraph: list[Line] = []

    def close() -> None:
        if paragraph:
            texts.append(_paragraph(paragraph, sizes, words))
            paragraph.clear()

    for block in blocks:
        if isinstance(block, Line):
            if paragraph and not _same_paragraph(paragraph[-1], block):
                close()
            paragraph.append(block)
            continue
        close()
        if isinstance(block, Table):
            texts.append(table_markdown(block.rows))
            continue
        parts += [_document(texts)] if texts else []
        parts.append(block)
        texts = []
    close()
    parts += [_document(texts)] if texts else []
    return [part for part in parts if part]


def table_markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table in the syntax of GitHub; the first row is the header."""
    cells = [[re.sub(r"\s+", " ", cell).strip().replace("|", "\\|") for cell in row] for row in rows]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return "\n".join([lines[0], "|" + " --- |" * len(cells[0]), *lines[1:]])


def _rounded(size: float) -> float:
    return round(2 * size) / 2


def _same_paragraph(above: Line, line: Line) -> bool:
    size = max(above.size, line.size)
    if abs(above.size - line.size) > 0.1 * size or _BULLET.match(line.text) or _NUMBER.match(line.text):
        return False
    space = line.y0 - above.y1
    if not -0.8 * size <= space <= _NEW_PARAGRAPH * size:  # far below, or above: in the next column
        return space < 0 and not above.text.rstrip().endswith((".", ":", "!", "?", "\u3002"))
    indented = line.x0 - above.x0 > 1.0 * size and above.text.rstrip().endswith((".", ":", "\u3002"))
    return not indented


def _ends_early(above: Line, line: Line) -> bool:
    """True if the first word of a line would have fitted into the line above: the text was broken there on purpose."""
    per_character = (line.x1 - line.x0) / max(len(line.text), 1)
    first = line.text if is_wide(line.text[0]) else line.text.split(" ", 1)[0]
    needed = per_character * (1 if is_wide(line.text[0]) else len(first) + 1)
    return above.right < math.inf and above.right - above.x1 > needed + 2 * above.size


def _paragraph(lines: Sequence[Line], sizes: Sizes, words: set[str]) -> str:
    above, text = lines[0], lines[0].text
    for line in lines[1:]:
        broken = text.endswith("-") and line.text[0].islower()
        wide = is_wide(text[-1]) and is_wide(line.text[0])
        separator = "\n" if broken else _HARD if _ends_early(above, line) else "" if wide else "\n"
        text += separator + line.text
        above = line
    text = re.sub(r"\s*\n\s*", " ", join_hyphens(text, words)).replace(_HARD, "\n")
    size = _rounded(lines[0].size)
    if size in sizes.headings and len(text) <= _MAX_HEADING and any(map(str.isalnum, text)):
        text = text.replace("\n", " ")
        level = 1 + min(sizes.headings.index(size), _HEADING_LEVELS - 1)
        return f"{'#' * level} {text}"
    if bullet := _BULLET.match(text):
        return f"- {text[bullet.end() :]}"
    if number := _NUMBER.match(text):
        return f"{number[1] or number[2]}. {text[number.end() :]}"
    return text


def _document(texts: Sequence[str]) -> str:
    """Join blocks; items of a list follow each other without an empty line."""
    result = ""
    for text in texts:
        item = text.startswith("- ") or re.match(r"\d+\. ", text)
        close = item and re.match(r"(?:- |\d+\. )", result.rsplit("\n\n", 1)[-1])
        result += ("\n" if close else "\n\n") + text if result else text
    return clean_text(result)
