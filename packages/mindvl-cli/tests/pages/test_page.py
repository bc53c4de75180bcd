# SPDX-License-Identifier: Apache-2.0
"""Tests of the frame of pages: text is escaped, nothing is fetched, empty sections vanish."""

from mindvl_cli.pages.page import page, section, table, tile


def test_a_page_is_whole_and_fetches_nothing() -> None:
    text = page("a < b", "<p>body</p>")
    assert text.startswith("<!doctype html>")
    assert "<title>a &lt; b</title>" in text
    assert "<style>" in text
    assert "http" not in text
    assert "src=" not in text


def test_text_is_escaped_and_a_section_without_content_is_left_out() -> None:
    assert "&lt;x&gt;" in tile("<x>", "title", "small")
    assert "<td>&amp;</td>" in table(["name", "value"], [["row", "&"]])
    assert section("title", "") == ""
    assert '<p class="lead">why</p>' in section("title", "<p>x</p>", lead="why")
