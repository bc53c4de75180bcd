# SPDX-License-Identifier: Apache-2.0
"""PDFs of real text, with planted noise: the data of the benchmark `documents`.

The text is that of the docstrings of Python's standard library, which every machine with Python has. A module becomes one
document; every tenth module, by a hash of its name, is held out. The noise is a function of the seed.
"""

import ast
import random
import re
import sysconfig
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

from mindvl_data.curation.pdf_writing import PlacedImage, PlacedText, write_pdf

SIZE = (300.0, 200.0)  # points
COLUMNS, LINES = 48, 11  # characters and lines of a page
FONTS = ("Helvetica", "Times-Roman")
PAGES_PER_DOCUMENT = 6

Page = tuple[str, ...]


@dataclass(frozen=True)
class Document:
    """A module of the standard library as pages of lines."""

    name: str
    pages: tuple[Page, ...]


def read_documents(num_pages: int, num_held_out: int) -> tuple[list[Document], list[Document]]:
    """Documents for training and held-out ones, with at least so many pages if the library has them."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in library.rglob("*.py") if not {"test", "tests", "site-packages"} & set(file.parts)]
    chosen: tuple[list[Document], list[Document]] = ([], [])
    counts, limits = [0, 0], (num_pages, num_held_out)
    for file in sorted(files, key=lambda file: _hash(file.relative_to(library).as_posix())):
        name = file.relative_to(library).as_posix()
        side = int(_hash(name)[:2], 16) % 10 == 0
        if counts[side] >= limits[side]:
            continue
        pages = tuple(_pages(_docstrings(file)))[:PAGES_PER_DOCUMENT]
        if pages:
            chosen[side].append(Document(name, pages))
            counts[side] += len(pages)
    return chosen


def write_corpus(directory: Path, documents: Sequence[Document], noise: bool, seed: int) -> dict[str, int]:
    """Write the documents as PDFs, with noise beside them if asked.

    Returns:
        Number of pages of each kind.
    """
    directory.mkdir(parents=True)
    chance = random.Random(seed)
    made: list[tuple[str, list[Page | None], str]] = []
    for document in documents:
        made.append(("clean", list(document.pages), chance.choice(FONTS)))
    if noise:
        made += [planted for document in documents for planted in _noise(document, chance)]
        chance.shuffle(made)
    counts: dict[str, int] = {}
    for number, (kind, pages, font) in enumerate(made):
        content = write_pdf([_drawn(page, font, chance) for page in pages], SIZE)
        if kind == "damaged":
            content = content[: len(content) // 3]
        (directory / f"{number:05d}.pdf").write_bytes(content)
        counts[kind] = counts.get(kind, 0) + len(pages)
    return counts


def _noise(document: Document, chance: random.Random) -> list[tuple[str, list[Page | None], str]]:
    """Noise that is planted for one document, as (kind, pages, font)."""
    pages, planted = document.pages, []
    font = chance.choice(FONTS)
    if chance.random() < 0.15:
        planted += [("duplicate", list(pages), font)] * 4
    if chance.random() < 0.1:
        planted += [("near-duplicate", [_edited(page, chance) for page in pages], name) for name in FONTS * 2]
    if chance.random() < 0.4:
        planted.append(("mojibake", [_mojibake(chance) for _ in pages], font))
    if chance.random() < 0.3:
        planted.append(("symbols", [_symbols(page, chance) for page in pages], "Courier"))
    if chance.random() < 0.25:
        planted.append(("repeated", [(chance.choice(page),) * LINES for page in pages], font))
    if chance.random() < 0.4:
        planted.append(("placeholder", [("This page is left blank.",)] * len(pages), font))
    if chance.random() < 0.1:
        planted.append(("blank-scan", [None] * len(pages), font))
    if chance.random() < 0.02:
        planted.append(("damaged", list(pages), font))
    return planted


def _edited(page: Page, chance: random.Random) -> Page:
    """A page with one word changed."""
    lines = list(page)
    index = chance.randrange(len(lines))
    words = lines[index].split()
    if words:
        words[chance.randrange(len(words))] = "again"
    lines[index] = " ".join(words)
    return tuple(lines)


def _mojibake(chance: random.Random) -> Page:
    """Chinese characters in UTF-8, read as Windows-1252, as broken converters leave them."""
    lines = []
    for _ in range(LINES):
        text = "".join(chr(chance.randint(0x4E00, 0x9FA5)) for _ in range(COLUMNS // 4))
        lines.append(text.encode().decode("cp1252", "replace").replace("\ufffd", "?"))
    return tuple(lines)


def _symbols(page: Page, chance: random.Random) -> Page:
    """Each letter replaced by a symbol, as in a font without a map to characters."""
    table = {letter: chance.choice("!#$%&*+/<=>?@^~\u00a7\u00b6\u00b1") for letter in "abcdefghijklmnopqrstuvwxyz"}
    return tuple("".join(table.get(character.lower(), character) for character in line) for line in page)


def _drawn(page: Page | None, font: str, chance: random.Random) -> list[PlacedText | PlacedImage]:
    if page is None:
        gray = np.random.default_rng(chance.getrandbits(32)).integers(225, 255, (100, 150, 1), np.uint8)
        return [PlacedImage(0, 0, *SIZE, np.repeat(gray, 3, axis=2))]
    return [PlacedText(16, 24 + 15.5 * index, line, 11, font) for index, line in enumerate(page)]


def _docstrings(file: Path) -> list[str]:
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError):
        return []
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    return [text for node in nodes if (text := ast.get_docstring(node))]


def _pages(texts: Sequence[str]) -> list[Page]:
    """Pages of wrapped paragraphs of prose; a page is full, or left out."""
    lines: list[str] = []
    for text in texts:
        for paragraph in re.split(r"\n\s*\n", text):
            words = paragraph.split()
            if len(words) >= 8 and paragraph.isascii() and sum(word.isalpha() for word in words) > 0.6 * len(words):
                lines += textwrap.wrap(" ".join(words), COLUMNS)
    return [tuple(lines[start : start + LINES]) for start in range(0, len(lines) - LINES + 1, LINES)]


def _hash(text: str) -> str:
    return blake2b(text.encode(), digest_size=8).hexdigest()
