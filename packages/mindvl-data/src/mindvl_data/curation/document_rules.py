# SPDX-License-Identifier: Apache-2.0
"""Rules that clean text of documents: garbled and control characters, spaces, ligatures, hyphenation, repeated lines.

Comes after pdf.py; used by page_markdown.py for PDFs and by the step `clean_document` for text of any origin. B.1.2.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Sequence

from mindvl_data.curation.page_layout import Line

LIGATURES = {
    "\ufb00": "ff",
    "\ufb01": "fi",
    "\ufb02": "fl",
    "\ufb03": "ffi",
    "\ufb04": "ffl",
    "\ufb05": "st",
    "\ufb06": "st",
}
_LIGATURES = str.maketrans(LIGATURES)
_INVISIBLE = re.compile("[\u200b\u200e\u200f\u2060-\u2064\ufeff\ufff9-\ufffb]")
_SPACES = re.compile("[\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000]")
_WIDE = "\u2e80-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff00-\uff60"
_BETWEEN_WIDE = re.compile(f"(?<=[{_WIDE}])[ \t]+(?=[{_WIDE}])")
_WORD = re.compile(r"[^\W\d_]+(?:-[^\W\d_]+)*")
_BROKEN = re.compile(r"([^\W\d_]{2,})-\n([^\W\d_]+)")
_IMAGE_MARKERS = re.compile(
    r"!\[[^\]\n]{0,1000}\]\([^)\n]{0,2000}\)|<img\b[^>]{0,2000}>|<image>|\[image\]", re.IGNORECASE
)
# UTF-8 read as Windows-1252: the first byte of a sequence and a byte after it, for Latin, punctuation, and Chinese.
_MOJIBAKE = re.compile(
    "\u00c3[\u0080-\u00bf]|\u00c2[\u00a0-\u00bf]|\u00e2\u20ac.|[\u00e4-\u00e9][\u00a0-\u00bf\u20ac\u2018-\u2122]{2}"
)
_FEW_PAGES = 3  # a line is repeated if it is on at least this many pages, and on this share of them
_REPEATED_SHARE = 0.5
_EDGE_LINES = 2  # lines at the top and at the bottom of a page that may be headers or footers
_EDGE_SHARE = 0.12  # and their distance from the edge, in heights of the page


def clean_text(text: str, keep_image_markers: bool = False) -> str:
    """Apply all rules that need no position: characters, spaces, ligatures, hyphenation, markers of images.

    Characters without meaning (controls, unpaired surrogates, private use) are removed; what garbled_share counts stays,
    so that a page with much of it is recognized and dropped.
    """
    text = unicodedata.normalize("NFC", text).translate(_LIGATURES).replace("\r\n", "\n").replace("\r", "\n")
    text = _INVISIBLE.sub("", _SPACES.sub(" ", text))
    text = "".join(character for character in text if character in "\n\t" or not _meaningless(character))
    if not keep_image_markers:
        text = _IMAGE_MARKERS.sub("", text)
    text = join_hyphens(text.replace("\u00ad\n", "-\n").replace("\u00ad", ""))
    text = _BETWEEN_WIDE.sub("", text)
    lines = [_narrowed(line) for line in text.split("\n")]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")


def join_hyphens(text: str, known: Collection[str] = ()) -> str:
    """Join words that a hyphen at the end of a line divides.

    The hyphen stays if the text contains the word with a hyphen elsewhere and never without it ("well-known"), or if the
    second part begins with a capital letter.

    Args:
        text: Text with line ends.
        known: Words (lower case) of the rest of the document.
    """
    if "-\n" not in text:
        return text
    words = {word.lower() for word in _WORD.findall(_BROKEN.sub(" ", text))} | set(known)

    def joined(match: re.Match[str]) -> str:
        first, second = match[1], match[2]
        hyphen = f"{first}-{second}".lower() in words and f"{first}{second}".lower() not in words
        return f"{first}-{second}" if hyphen or second[0].isupper() else f"{first}{second}"

    return _BROKEN.sub(joined, text)


def words_of(text: str) -> set[str]:
    """Words in lower case, with hyphens inside, without those that a line end divides."""
    return {word.lower() for word in _WORD.findall(_BROKEN.sub(" ", text))}


def garbled_share(text: str) -> float:
    """Share of characters that are signs of a broken encoding, of all that are not spaces; 0 for an empty text.

    Counted are U+FFFD, control characters, unassigned and private characters, unpaired surrogates, pdfium's `(cid:N)` for
    glyphs without a character, and sequences that arise when UTF-8 is read as Windows-1252.
    """
    visible = sum(not character.isspace() for character in text)
    if not visible:
        return 0.0
    broken = sum(character == "\ufffd" or (character not in "\n\t\r" and _meaningless(character)) for character in text)
    broken += sum(len(match) for match in _MOJIBAKE.findall(text))
    broken += sum(len(match) for match in re.findall(r"\(cid:\d{1,6}\)", text))
    return min(1.0, broken / visible)


def without_repeated_lines(pages: Sequence[tuple[float, Sequence[Line]]]) -> list[list[Line]]:
    """Remove headers and footers: lines near an edge whose text, numbers apart, is at the same edge of many pages.

    Args:
        pages: Height in points and lines of each page.
    """
    edges = [_edge_lines(height, lines) for height, lines in pages]
    counts: Counter[tuple[str, str]] = Counter()
    for found in edges:
        counts.update({key for _, key in found})
    needed = max(_FEW_PAGES, _REPEATED_SHARE * len(pages))
    cleaned: list[list[Line]] = []
    for (_, lines), found in zip(pages, edges, strict=True):
        repeated = {index for index, key in found if counts[key] >= needed}
        cleaned.append([line for index, line in enumerate(lines) if index not in repeated])
    return cleaned


def _edge_lines(height: float, lines: Sequence[Line]) -> list[tuple[int, tuple[str, str]]]:
    """(index, (edge, text without numbers)) of the lines that may be headers or footers."""
    order = sorted(range(len(lines)), key=lambda index: lines[index].middle)
    found: list[tuple[int, tuple[str, str]]] = []
    for edge, near in (("top", order), ("bottom", order[::-1])):
        positions: list[float] = []
        for index in near:
            line = lines[index]
            distance = line.y0 if edge == "top" else height - line.y1
            if distance > _EDGE_SHARE * height:
                break
            if not positions or abs(positions[-1] - line.middle) > 0.5 * line.size:
                positions.append(line.middle)
            if len(positions) > _EDGE_LINES:
                break
            found.append((index, (edge, re.sub(r"\d+|\b[ivxlc]+\b", "#", line.text.strip().lower()))))
    return found


def _meaningless(character: str) -> bool:
    return (
        (character > "~" and unicodedata.category(character) in ("Cc", "Cs", "Co", "Cn"))
        or (character < " " and character not in "\n\t")
        or character == "\x7f"
    )


def _narrowed(line: str) -> str:
    """Reduce spaces inside a line to one; the indentation and cells of a table stay."""
    indent = len(line) - len(line.lstrip(" "))
    return (" " * indent + re.sub(r"[ \t]{2,}", " ", line.strip())) if line.strip() else ""
