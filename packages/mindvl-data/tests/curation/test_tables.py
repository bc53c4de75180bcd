# SPDX-License-Identifier: Apache-2.0
"""Steps for tables: HTML, rendered tables and charts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindvl_data.curation.record import Record
from mindvl_data.curation.step import Context, Drop
from mindvl_data.curation.tables import (
    ChartTableConfig,
    RenderTableConfig,
    TableConfig,
    chart_table,
    render_table,
    table_html,
)

CONTEXT = Context(seed=4, cache=Path("unused"))
NUMBERS = 'year,apples,pears\n2019,1.5,20\n2020,"1,200",30\n2021,-3,4%'
SPANS = "<table><tr><th colspan=2>wide</th></tr><tr><td>a</td><td>b</td></tr></table>"


def text_record(text: str, **body: Any) -> Record:
    return Record(number=2, id="t", body={"content": text, **body})


def one(outcomes: Any) -> Any:
    (outcome,) = outcomes
    return outcome


def test_the_answer_is_replaced_by_plain_html_and_its_size_is_a_fact() -> None:
    question = [{"type": "image"}, {"type": "text", "text": "?"}]
    body = {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "a|b\n-|-\n1|2"}]}
    kept = one(table_html([Record(number=0, id="a", body=body, media=(b"image",))], TableConfig(), CONTEXT))
    assert kept.answers() == [
        "<table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>1</td><td>2</td></tr></tbody></table>"
    ]
    assert kept.body["messages"][0]["content"] == question
    assert kept.facts == {"table_rows": 2, "table_columns": 2}


def test_tables_without_a_grid_and_large_tables_are_dropped() -> None:
    assert one(table_html([text_record("<table><tr><td>a<tr><td>b<td>c</table>")], TableConfig(), CONTEXT)) == Drop(
        "inconsistent_grid", "no cell at row 1, column 2"
    )
    dropped = one(table_html([text_record("a,b\n1,2\n3,4")], TableConfig(max_rows=2), CONTEXT))
    assert (dropped.reason, dropped.value) == ("too_large", "3 x 2")
    assert one(table_html([text_record("a,b\n1,2")], TableConfig(source="html"), CONTEXT)).reason == "no_table"


def test_a_table_is_drawn_with_its_html_as_the_answer() -> None:
    pytest.importorskip("matplotlib")
    config = RenderTableConfig(min_size=20, max_size=20)
    record = one(render_table([text_record(SPANS)], config, CONTEXT))
    assert record.answers() == [
        '<table><thead><tr><th colspan="2">wide</th></tr></thead><tbody><tr><td>a</td><td>b</td></tr></tbody></table>'
    ]
    assert record.image().shape[0] >= 2 * 30  # two rows of 1.5 font sizes
    assert record.image().min() < 60 < 250 < record.image().max()
    assert record.texts()[0].isascii()
    assert one(render_table([text_record(SPANS)], RenderTableConfig(max_pixels=100), CONTEXT)).reason == "too_large"
    missing = one(render_table([text_record("a,\u4e2d\n1,2")], config, CONTEXT))
    assert missing == Drop("missing_glyphs", "\u4e2d")


@pytest.mark.slow
def test_a_chart_is_drawn_with_its_table_as_the_answer() -> None:
    pytest.importorskip("matplotlib")
    for kind in ("bar", "barh", "line"):
        config = ChartTableConfig(kinds=(kind,))
        record = one(chart_table([text_record(NUMBERS, title="costs $5_a$")], config, CONTEXT))
        assert record.answers()[0].splitlines()[::3] == ["| year | apples | pears |", "| 2020 | 1,200 | 30 |"]
        assert record.facts == {"chart": kind}
        assert len(np.unique(record.image().reshape(-1, 3), axis=0)) > 10
        again = one(chart_table([text_record(NUMBERS, title="costs $5_a$")], config, CONTEXT))
        assert again.media == record.media


def test_only_one_series_without_negative_values_becomes_a_pie() -> None:
    pytest.importorskip("matplotlib")
    config = ChartTableConfig(kinds=("pie",))
    assert one(chart_table([text_record("k,v\na,1\nb,2")], config, CONTEXT)).facts == {"chart": "pie"}
    assert one(chart_table([text_record("k,v\na,1\nb,-2")], config, CONTEXT)).reason == "not_numeric"


def test_tables_that_no_chart_can_show_are_dropped() -> None:
    pytest.importorskip("matplotlib")
    assert one(chart_table([text_record("a,b\nx,one\ny,two")], ChartTableConfig(), CONTEXT)).reason == "not_numeric"
    many = "k,v\n" + "\n".join(f"c{number},1" for number in range(13))
    assert one(chart_table([text_record(many)], ChartTableConfig(), CONTEXT)).value == "13 x 1"
