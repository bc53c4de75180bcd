# SPDX-License-Identifier: Apache-2.0
"""The frame of every page: text is escaped, nothing is fetched, empty sections vanish, and no Python file builds HTML."""

import re
from pathlib import Path

import jinja2
import numpy as np
import pytest
from PIL import Image

from mindvl_cli.pages import render as rendering
from mindvl_cli.pages.render import data_url, share_text

SOURCES = Path(__file__).parents[4] / "packages"
TEMPLATES = Path(rendering.__file__).parent / "templates"


def _page(body: str, **values: object) -> str:
    start = '{% extends "base.html.j2" %}{% from "parts.html.j2" import section, table, tile %}{% block body %}'
    return rendering._environment().from_string(start + body + "{% endblock %}").render(title="a < b", **values)


def test_a_page_is_whole_and_fetches_nothing() -> None:
    text = _page("<p>body</p>")
    assert text.startswith("<!doctype html>")
    assert "<title>a &lt; b</title>" in text
    assert 'name="viewport" content="width=device-width' in text
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text
    assert not re.findall(r"http|src=|@import|url\(", text)


def test_values_are_escaped_and_a_section_without_content_is_left_out() -> None:
    text = _page(
        '{{ tile(x, x, x) }}{{ table([x], [(x, "&")]) }}{% call section(x, x) %}{{ x }}{% endcall %}'
        '{% call section("empty") %}{{ table(["a"], []) }}{% endcall %}',
        x="<x>",
    )
    assert "<x>" not in text
    assert text.count("&lt;x&gt;") == 8
    assert "<td>&amp;</td>" in text
    assert "<h2>empty" not in text


def test_a_value_that_a_template_misses_is_an_error() -> None:
    with pytest.raises(jinja2.UndefinedError):
        _page("{{ missing }}")


def test_no_template_switches_escaping_off() -> None:
    for path in TEMPLATES.glob("*.j2"):
        assert not re.findall(r"\|\s*safe|autoescape|Markup", path.read_text()), path.name


def test_pages_are_written_by_templates_alone() -> None:
    tag = re.compile(
        r"""["'>]</?(html|body|div|section|span|table|t[rdh]|ul|li|p|h[1-6]|figure|svg|rect|path|g)\b[^|]"""
    )
    found = {path.name for path in SOURCES.glob("*/src/**/*.py") if tag.search(path.read_text(encoding="utf-8"))}
    # plots.py puts the attributes of a page into matplotlib's SVG; table_html.py writes tables that models are trained on.
    assert found == {"plots.py", "table_html.py"}


def test_an_image_is_embedded_in_the_page() -> None:
    assert data_url(Image.new("L", (2, 2))).startswith("data:image/png;base64,iVBOR")
    assert data_url(np.zeros((2, 2, 3), np.uint8), "JPEG").startswith("data:image/jpeg;base64,/9j/")


def test_numbers_are_shortened_and_missing_ones_are_a_dash() -> None:
    filters = rendering._environment().filters
    assert [filters["fmt"](1234567), filters["fmt"](0.5, ".1%"), filters["fmt"](None)] == ["1,234,567", "50.0%", "-"]
    assert [filters["compact"](count) for count in (999, 1234, 2_500_000, 3e9)] == ["999", "1.23 k", "2.5 M", "3 B"]
    assert (
        filters["pairs"]({"tp_size": 2, "none": None, "more": {"kind": "x", "y": None}}) == "tp size 2, more (kind x)"
    )


def test_a_share_is_shown_in_percent_and_a_missing_one_as_a_dash() -> None:
    assert [share_text(share) for share in (0.12345, None)] == ["12.35%", "-"]
