# SPDX-License-Identifier: Apache-2.0
"""Steps for tables and charts: normalized HTML, rendered tables, charts with their data. B.1.3.

Comes after the readers, or after a step that made a table from an image; uses table_html.py and charts.py.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from mindvl_data.curation.charts import chart_image, chart_series
from mindvl_data.curation.documents import is_chinese, question_and_answer
from mindvl_data.curation.extras import require
from mindvl_data.curation.fonts import font_files, usable_fonts
from mindvl_data.curation.page_markdown import table_markdown
from mindvl_data.curation.record import Record
from mindvl_data.curation.step import Context, Drop, Outcome, Step
from mindvl_data.curation.table_html import (
    Rows,
    TableError,
    check_grid,
    from_csv,
    from_html,
    from_markdown,
    from_text,
    texts_of,
    to_html,
)

PROMPTS = ("Convert this table to HTML.", "Write the table in the image as HTML.")
PROMPTS_ZH = (
    "\u5c06\u8868\u683c\u8f6c\u6362\u4e3a HTML\u3002",
    "\u7528 HTML \u5199\u51fa\u56fe\u4e2d\u7684\u8868\u683c\u3002",
)
CHART_PROMPTS = ("Convert this chart to a table in Markdown.", "List the data of the chart as a Markdown table.")
CHART_PROMPTS_ZH = (
    "\u5c06\u56fe\u8868\u8f6c\u6362\u4e3a Markdown \u8868\u683c\u3002",
    "\u7528 Markdown \u8868\u683c\u5217\u51fa\u56fe\u8868\u4e2d\u7684\u6570\u636e\u3002",
)
_READERS: dict[str, Callable[[str], Rows]] = {
    "auto": from_text,
    "html": from_html,
    "markdown": from_markdown,
    "csv": from_csv,
}
_GRID_REASONS = {
    "no_table": "The text is not one table.",
    "nested_table": "A table is in a cell of another one.",
    "inconsistent_grid": "The cells, with their spans, overlap or leave gaps.",
    "empty_table": "No cell has text.",
    "too_large": "The table has more rows, columns or cells than allowed.",
}


@dataclass(frozen=True, kw_only=True)
class TableConfig:
    """Parameters of the step `table_html`.

    Attributes:
        source: Format of the tables; `auto` recognizes it.
        max_rows, max_columns: Larger tables are dropped.
    """

    source: Literal["auto", "html", "markdown", "csv"] = "auto"
    max_rows: int = 100
    max_columns: int = 40


@dataclass(frozen=True, kw_only=True)
class RenderTableConfig(TableConfig):
    """Parameters of the step `render_table`.

    Attributes:
        fonts: Font files; by default DejaVu of an installed matplotlib.
        min_size, max_size: Limits of the font size in pixels.
        max_pixels: Tables whose image would be larger are dropped.
    """

    fonts: tuple[Path, ...] = ()
    min_size: int = 14
    max_size: int = 24
    max_pixels: int = 4_000_000


@dataclass(frozen=True, kw_only=True)
class ChartTableConfig(TableConfig):
    """Parameters of the step `chart_table`.

    Attributes:
        kinds: Kinds of charts, chosen by the seed among those that can show the data (pie: one series, no negative value).
        max_categories, max_series: Tables with more are dropped, because their charts are not readable.
        fonts: Font files; by default DejaVu of matplotlib.
    """

    kinds: tuple[Literal["bar", "barh", "line", "pie"], ...] = ("bar", "barh", "line", "pie")
    max_categories: int = 12
    max_series: int = 4
    fonts: tuple[Path, ...] = ()


@Step(
    config=TableConfig,
    summary="Write tables as plain HTML and drop those whose cells do not form a grid.",
    section="B.1.3",
    needs=("text",),
    gives=("table_rows", "table_columns"),
    reasons=_GRID_REASONS,
)
def table_html(records: list[Record], config: TableConfig, context: Context) -> Sequence[Outcome]:
    """B.1.3: replace the answer of each record, a table in HTML, Markdown or CSV, by plain HTML whose grid is consistent."""
    tables = [_table("\n".join(record.answers()), config) for record in records]
    return [
        table if isinstance(table, Drop) else _with_answer(record, to_html(table[0])).with_facts(**table[1])
        for record, table in zip(records, tables, strict=True)
    ]


@Step(
    config=RenderTableConfig,
    summary="Draw tables as images with their HTML as the answer.",
    section="B.1.3",
    needs=("text",),
    gives=("table_rows", "table_columns"),
    reasons={**_GRID_REASONS, "missing_glyphs": "No font has all characters of the table."},
    prepare=lambda config, context: font_files(config.fonts),
)
def render_table(records: list[Record], config: RenderTableConfig, context: Context) -> Sequence[Outcome]:
    """B.1.3: draw the table of each record in varied styles; the answer is its plain HTML."""
    fonts = font_files(config.fonts)
    return [_rendered(record, fonts, config, context) for record in records]


def _rendered(record: Record, fonts: Sequence[str], config: RenderTableConfig, context: Context) -> Outcome:
    table = _table("\n".join(record.answers()), config)
    if isinstance(table, Drop):
        return table
    rows, facts = table
    text = "".join(cell.text for row in rows for cell in row)
    usable, missing = usable_fonts(text, fonts, context)
    if not usable:
        return Drop("missing_glyphs", missing[:50])
    image = _drawn(rows, usable, config, context.random(record, "render_table"))
    if image is None:
        return Drop("too_large", "pixels", facts)
    prompts = PROMPTS_ZH if is_chinese(text) else PROMPTS
    return _pair(record, image, prompts, to_html(rows), context).with_facts(**facts)


def _prepare_charts(config: ChartTableConfig, context: Context) -> None:
    require("matplotlib", extra="plots", where="steps: chart_table")
    font_files(config.fonts)


@Step(
    config=ChartTableConfig,
    summary="Draw the numbers of tables as charts with the table as the answer.",
    section="B.1.3",
    needs=("text",),
    gives=("chart",),
    reasons={
        **_GRID_REASONS,
        "not_numeric": "The table is not one of categories and numbers.",
        "missing_glyphs": "No font has all characters of the table.",
    },
    extra="plots",
    prepare=_prepare_charts,
)
def chart_table(records: list[Record], config: ChartTableConfig, context: Context) -> Sequence[Outcome]:
    """B.1.3: draw the numbers of a table as a chart; the answer is the table in Markdown.

    The first column has the categories, the first row the names of the series; `title` of the record is the title.
    """
    fonts = font_files(config.fonts)
    return [_chart(record, fonts, config, context) for record in records]


def _chart(record: Record, fonts: Sequence[str], config: ChartTableConfig, context: Context) -> Outcome:
    table = _table("\n".join(record.answers()), config)
    if isinstance(table, Drop):
        return table
    texts, title = texts_of(table[0]), str(record.body.get("title") or "")
    series = chart_series(texts)
    if series is None:
        return Drop("not_numeric")
    if len(texts) - 1 > config.max_categories or len(series) > config.max_series:
        return Drop("too_large", f"{len(texts) - 1} x {len(series)}")
    shown = title + "".join(map("".join, texts))
    usable, missing = usable_fonts(shown, fonts, context)
    if not usable:
        return Drop("missing_glyphs", missing[:50])
    is_parts = len(series) == 1 and min(series[0]) >= 0 < sum(series[0])
    kinds = [kind for kind in config.kinds if kind != "pie" or is_parts]
    if not kinds:
        return Drop("not_numeric", "no kind of chart shows this table")
    chance = context.random(record, "chart_table")
    kind = chance.choice(kinds)
    image = chart_image(kind, texts, series, title, chance.choice(usable), chance)
    prompts = CHART_PROMPTS_ZH if is_chinese(shown) else CHART_PROMPTS
    return _pair(record, image, prompts, table_markdown(texts), context).with_facts(chart=kind)


def _table(text: str, config: TableConfig) -> tuple[Rows, dict[str, Any]] | Drop:
    try:
        rows = _READERS[config.source](text)
        num_rows, num_columns = check_grid(rows)
    except TableError as error:
        return Drop(error.reason, str(error))
    facts = {"table_rows": num_rows, "table_columns": num_columns}
    if num_rows > config.max_rows or num_columns > config.max_columns:
        return Drop("too_large", f"{num_rows} x {num_columns}", facts)
    return rows, facts


def _with_answer(record: Record, answer: str) -> Record:
    """The record with one text in place of that of the last assistant message, or of `content`."""
    text = [{"type": "text", "text": answer}]
    if "messages" not in record.body:
        content = record.body["content"]
        media = [part for part in content if isinstance(part, dict) and part.get("type") in ("image", "video")]
        return record.with_body(content=[*(media if isinstance(content, list) else []), *text])
    turns = list(record.body["messages"])
    last = max(index for index, turn in enumerate(turns) if turn.get("role") == "assistant")
    turns[last] = {**turns[last], "content": text}
    return record.with_body(messages=turns)


def _pair(record: Record, image: bytes, prompts: Sequence[str], answer: str, context: Context) -> Record:
    body = {key: value for key, value in record.body.items() if key not in ("messages", "content")}
    body["messages"] = question_and_answer(context.random(record, "table prompt").choice(list(prompts)), answer)
    return replace(record.with_media((image,)), body=body)


def _drawn(rows: Rows, fonts: Sequence[str], config: RenderTableConfig, chance: Any) -> bytes | None:
    """The table as PNG; None if it has too many pixels."""
    size = chance.randint(config.min_size, config.max_size)
    font = chance.choice(list(fonts))
    face = ImageFont.truetype(font, size)
    pad, row_height = chance.randint(size // 3, size), round(1.5 * size)
    lines, ruled_rows, ruled_columns = chance.choice(
        ((1, True, True), (2, True, True), (1, True, False), (1, False, False))
    )
    shaded = chance.random() < 0.5
    num_rows, num_columns = check_grid(rows)
    placed = _places(rows)
    widths, heights = np.full(num_columns, 2 * size), np.full(num_rows, row_height)
    for (row, column), cell in placed:
        texts = cell.text.split("\n")
        needed = 2 * pad + max(face.getlength(text) for text in texts)
        share = -(-needed // cell.colspan)
        widths[column : column + cell.colspan] = np.maximum(widths[column : column + cell.colspan], share)
        tall = -(-row_height * len(texts) // cell.rowspan)
        heights[row : row + cell.rowspan] = np.maximum(heights[row : row + cell.rowspan], tall)
    margin = chance.randint(4, 2 * size)
    x = margin + np.concatenate([[0], np.cumsum(widths)])
    y = margin + np.concatenate([[0], np.cumsum(heights)])
    if int(x[-1] + margin) * int(y[-1] + margin) > config.max_pixels:
        return None
    image = Image.new("RGB", (int(x[-1]) + margin, int(y[-1]) + margin), "white")
    drawing = ImageDraw.Draw(image)
    for (row, column), cell in placed:
        left, top = int(x[column]), int(y[row])
        right, bottom = int(x[column + cell.colspan]), int(y[row + cell.rowspan])
        if shaded and cell.is_header:
            drawing.rectangle((left, top, right, bottom), fill=(225, 230, 238))
        for number, text in enumerate(cell.text.split("\n")):
            drawing.text(
                (left + pad, top + row_height * number + (row_height - size) // 2), text, font=face, fill="black"
            )
        if ruled_columns:
            drawing.rectangle((left, top, right, bottom), outline="black", width=lines)
        elif ruled_rows or row == 0:
            drawing.line((left, bottom, right, bottom), fill="black", width=lines)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def _places(rows: Rows) -> list[tuple[tuple[int, int], Any]]:
    """(row, column) of the upper left corner of each cell."""
    taken: set[tuple[int, int]] = set()
    placed: list[tuple[tuple[int, int], Any]] = []
    for index, row in enumerate(rows):
        column = 0
        for cell in row:
            while (index, column) in taken:
                column += 1
            placed.append(((index, column), cell))
            taken |= {(index + down, column + right) for down in range(cell.rowspan) for right in range(cell.colspan)}
    return placed
