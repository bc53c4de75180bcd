# SPDX-License-Identifier: Apache-2.0
"""A few shapes as SVG: boxes, labels, arrows, in colors that can be read on a light and on a dark page.

Comes before figures.py. Lines and text take the current color, fills are half transparent. As a file of its own the
drawing follows the preference of the reader's system; inside of a page stage.py removes the style, and the drawing
takes the color of the page.
"""

from collections.abc import Sequence
from html import escape

COLORS = {
    "image": "#e0803a",
    "text": "#3b82c4",
    "label": "#2f9e6e",
    "plain": "#888888",
    "pad": "#bbbbbb",
    "warm": "#c2495a",
}
STYLE = "<style>svg{color:#1f2328}@media(prefers-color-scheme:dark){svg{color:#e6edf3}}</style>"


class Drawing:
    """Shapes in the order in which they are added."""

    def __init__(self, width: int, height: int) -> None:
        self._size = (width, height)
        self._parts: list[str] = []

    def box(
        self, x: float, y: float, width: float, height: float, *lines: str, color: str = "plain", strong: float = 0.25
    ) -> None:
        """A filled box with centered lines of text; the first is bold where there are several."""
        paint = COLORS[color]
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{paint}" '
            f'fill-opacity="{strong:g}" stroke="{paint}"/>'
        )
        top = y + height / 2 - 7.5 * (len(lines) - 1)
        for number, line in enumerate(lines):
            is_bold = number == 0 and len(lines) > 1
            self.text(x + width / 2, top + 15 * number, line, anchor="middle", size=12 if is_bold else 11, bold=is_bold)

    def cell(self, x: float, y: float, width: float, height: float, color: str, strong: float = 0.55) -> None:
        """A box without a border, for maps of many cells."""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{COLORS[color]}" '
            f'fill-opacity="{strong:g}"/>'
        )

    def text(
        self, x: float, y: float, text: str, *, anchor: str = "start", size: float = 11, bold: bool = False
    ) -> None:
        """One line of text, centered vertically at y."""
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y + size * 0.35:g}" font-size="{size:g}" text-anchor="{anchor}"{weight}>'
            f"{escape(text, quote=False)}</text>"
        )

    def arrow(self, *points: tuple[float, float]) -> None:
        """A line through the points with a head at its end."""
        path = "L".join(f"{x:g} {y:g}" for x, y in points)
        self._parts.append(f'<path d="M{path}" fill="none" stroke="currentColor" marker-end="url(#head)"/>')

    def line(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """A thin line without a head."""
        self._parts.append(
            f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" stroke="currentColor" stroke-opacity=".6" stroke-width=".7"/>'
        )

    def outline(self, x: float, y: float, width: float, height: float) -> None:
        """The border of a box without a filling."""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="none" stroke="currentColor"/>'
        )

    def polygon(self, points: Sequence[tuple[float, float]], color: str) -> None:
        """A filled area without a border."""
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        self._parts.append(f'<path d="M{path}z" fill="{COLORS[color]}" fill-opacity=".55"/>')

    def svg(self) -> str:
        """The document."""
        width, height = self._size
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'font-family="system-ui,sans-serif" fill="currentColor">\n'
            f'{STYLE}\n<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path d="M0 0L8 4L0 8z" fill="currentColor"/></marker></defs>\n'
        )
        return head + "\n".join(self._parts) + "\n</svg>\n"
