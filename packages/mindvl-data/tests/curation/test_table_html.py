# SPDX-License-Identifier: Apache-2.0
"""Tables from HTML, Markdown and CSV, and checks of their grid."""

import pytest

from mindvl_data.curation.table_html import (
    Cell,
    TableError,
    check_grid,
    from_csv,
    from_html,
    from_markdown,
    from_text,
    texts_of,
    to_html,
)


def reason_of(html: str) -> str:
    with pytest.raises(TableError) as error:
        check_grid(from_html(html))
    return error.value.reason


def test_html_is_reduced_to_structure_and_simple_formatting() -> None:
    html = """<div><script>alert('x<td>')</script><TABLE class="t" onclick="evil()"><caption>c</caption><thead>
      <tr><th style="x">A &amp; B</th><td>H<sub>2</sub>O</td></tr></thead>
      <tr><td> <a href="javascript:x">link</a>  text<br/>next</td><td>&lt;5 &#8364;<strong>bold</td></tr></TABLE></div>"""
    assert to_html(from_html(html)) == (
        "<table><thead><tr><th>A &amp; B</th><th>H<sub>2</sub>O</th></tr></thead>"
        "<tbody><tr><td>link text<br>next</td><td>&lt;5 \u20ac<b>bold</b></td></tr></tbody></table>"
    )


def test_plain_html_is_not_changed_again() -> None:
    html = '<table><tbody><tr><td rowspan="2">a</td><td colspan="2">b</td></tr><tr><td>c</td><td>d</td></tr></tbody></table>'
    assert to_html(from_html(html)) == html
    assert check_grid(from_html(html)) == (2, 3)


@pytest.mark.parametrize(
    ("html", "reason"),
    [
        ("no table", "no_table"),
        ("<table><tr><td>a</td></tr></table><table></table>", "no_table"),
        ("<table><tr><td>a<table></table></td></tr></table>", "nested_table"),
        ("<table><tr><td> </td></tr></table>", "empty_table"),
        ("<table><tr><td>a</td><td>b</td></tr><tr><td>c</td></tr></table>", "inconsistent_grid"),  # a gap
        ("<table><tr><td rowspan=2>a</td><td>b</td></tr></table>", "inconsistent_grid"),  # beyond the last row
        ("<table><tr><td>a</td><td rowspan=2>b</td></tr><tr><td colspan=2>c</td></tr></table>", "inconsistent_grid"),
        ("<table><tr><td colspan=999999>a</td></tr></table>", "too_large"),
        ("<table>" + "<tr><td colspan=1000>a</td></tr>" * 21 + "</table>", "too_large"),
    ],
)
def test_tables_that_are_not_a_grid_are_refused_for_the_reason(html: str, reason: str) -> None:
    assert reason_of(html) == reason


def test_markdown_and_csv_become_the_same_table() -> None:
    expected = ((Cell("a", True), Cell("b|c", True)), (Cell("1 &lt; 2"), Cell("x")))
    assert from_markdown("| a | b\\|c |\n|---|:-:|\n| 1 < 2 | x |") == expected
    assert from_csv('a,b|c\n"1 < 2",x') == expected
    assert from_csv("a\tb|c\n1 < 2\tx") == expected
    assert texts_of(expected) == [["a", "b|c"], ["1 < 2", "x"]]


def test_the_format_is_recognized() -> None:
    for text in ("a | b\n--- | ---\n1 | 2", "a,b\n1,2", "<table><tr><th>a<th>b<tr><td>1<td>2</table>"):
        assert texts_of(from_text(text)) == [["a", "b"], ["1", "2"]]
    for text in ("only a sentence", "one\ntwo"):
        with pytest.raises(TableError):
            from_text(text)
