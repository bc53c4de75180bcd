# SPDX-License-Identifier: Apache-2.0
"""The rules that clean text of documents."""

import pytest

from mindvl_data.curation.document_rules import clean_text, garbled_share, join_hyphens, without_repeated_lines
from mindvl_data.curation.page_layout import Line


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("the \ufb01rst e\ufb00ect", "the first effect"),  # ligatures
        (
            "\u4e2d \u6587 \uff0c \u597d abc \u4e2d",
            "\u4e2d\u6587\uff0c\u597d abc \u4e2d",
        ),  # spaces between wide characters
        ("a\x00b\x0bc\u200bd\ufeffe", "abcde"),  # controls and invisible characters
        ("one\u00a0 two\u3000\tthree", "one two three"),  # spaces of all kinds
        ("soft\u00adware", "software"),  # soft hyphen
        ("e\u0301", "\u00e9"),  # composed
        ("a\r\nb\rc", "a\nb\nc"),
        ("a\n\n\n\n\nb\n", "a\n\nb"),
        ("  indented   text", "  indented text"),
        ("x ![figure](f.png) y", "x y"),
    ],
)
def test_texts_are_cleaned(text: str, cleaned: str) -> None:
    assert clean_text(text) == cleaned


def test_a_hyphen_at_the_end_of_a_line_stays_only_in_a_word_that_is_written_with_it() -> None:
    assert join_hyphens("a para-\ngraph") == "a paragraph"
    assert join_hyphens("a well-\nknown and another well-known one") == "a well-known and another well-known one"
    assert join_hyphens("the self-\ntest", known={"self-test"}) == "the self-test"
    assert join_hyphens("Jean-\nPaul") == "Jean-Paul"
    assert join_hyphens("1990-\n1995") == "1990-\n1995"


def test_the_garbled_share_counts_signs_of_a_broken_encoding() -> None:
    assert garbled_share("plain text, \u4e2d\u6587, caf\u00e9") == 0.0
    assert garbled_share("ab\ufffd\ufffd") == 0.5
    assert garbled_share("\u00c3\u00a9t\u00c3\u00a9") == 0.8  # "ete" with accents, read as Windows-1252
    assert garbled_share("(cid:12)(cid:7)a") == pytest.approx(15 / 16)
    assert garbled_share(" \n") == 0.0


def line(text: str, y: float) -> Line:
    return Line(text, 72, y, 300, y + 12, 10)


def test_headers_and_footers_with_changing_numbers_are_removed_and_text_at_the_edge_stays() -> None:
    pages = [
        (842.0, [line(f"Chapter 1: page {n}", 30), line(text, 60), line("body", 400), line(f"{n}", 800)])
        for n, text in enumerate(["different", "words", "here"], start=1)
    ]
    cleaned = without_repeated_lines(pages)
    assert [[one.text for one in page] for page in cleaned] == [
        ["different", "body"],
        ["words", "body"],
        ["here", "body"],
    ]


def test_a_line_on_two_pages_only_or_in_the_middle_is_not_a_header() -> None:
    pages = [(842.0, [line("title", 30), line("same", 400)]), (842.0, [line("title", 30), line("same", 400)])]
    assert [len(page) for page in without_repeated_lines(pages)] == [2, 2]
    assert [len(page) for page in without_repeated_lines([*pages, (842.0, [line("same", 400)])])] == [2, 2, 1]
