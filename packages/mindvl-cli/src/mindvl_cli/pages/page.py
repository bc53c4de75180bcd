# SPDX-License-Identifier: Apache-2.0
"""The frame of every page: head, style, sections, tiles; nothing is fetched when it is opened."""

from collections.abc import Sequence
from html import escape
from importlib.resources import files


def page(title: str, body: str) -> str:
    """A whole document; `title` is escaped here, `body` is HTML."""
    style = files("mindvl_cli.pages").joinpath("style.css").read_text(encoding="utf-8")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{style}</style></head>'
        f"<body><main>{body}</main></body></html>\n"
    )


def section(title: str, content: str, *, lead: str = "") -> str:
    """A card with a heading; nothing at all when there is no content (HTML)."""
    lead = f'<p class="lead">{escape(lead)}</p>' if lead else ""
    return f"<section><h2>{escape(title)}</h2>{lead}{content}</section>" if content else ""


def tile(figure: str, title: str, small: str) -> str:
    """One figure in large type with what it is and a remark."""
    return f'<div class="tile"><b>{escape(figure)}</b><span>{escape(title)}</span><small>{escape(small)}</small></div>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of text; the first column names the row."""
    top = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    lines = [
        f'<tr><th scope="row">{escape(row[0])}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:]) + "</tr>"
        for row in rows
    ]
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
