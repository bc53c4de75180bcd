# SPDX-License-Identifier: Apache-2.0
"""Two loss curves on each other, and below how far they lie apart: one SVG file that stands alone.

Comes after mindvl_train.checks.alignment. Documents show it as an image, so its colours hold on a light and on a dark
ground.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mindvl_train.checks.alignment import AlignmentReport

_WIDTH, _LEFT, _RIGHT = 720, 64, 16
_TOP, _CURVES, _GAP, _DIFFERENCES, _BOTTOM = 34, 220, 40, 110, 30
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#7a8290}.grid{stroke:#7a8290;stroke-opacity:.25}"
    ".plain{fill:none;stroke:#e0a030;stroke-width:6;stroke-opacity:.75;stroke-linejoin:round}"
    ".ours{fill:none;stroke:#2f6fe0;stroke-width:1.8;stroke-linejoin:round}"
    ".apart{fill:none;stroke:#2f6fe0;stroke-width:1.4}.bound{stroke:#d0453a;stroke-dasharray:5 4}"
)


def alignment_svg(report: "AlignmentReport") -> str:
    """The figure: losses by step, ours thin over the plain one, and their relative difference on a log scale."""
    height = _TOP + _CURVES + _GAP + _DIFFERENCES + _BOTTOM
    steps = [step.step for step in report.steps]
    top, bottom = _TOP, _TOP + _CURVES
    ours, plain = ([getattr(step, name) for step in report.steps] for name in ("loss", "plain_loss"))
    low, high = min(*ours, *plain), max(*ours, *plain)
    margin = 0.05 * (high - low) or 0.5
    low, high = low - margin, high + margin
    body = _levels([low + (high - low) * part / 4 for part in range(5)], low, high, top, bottom, "{:.3g}")
    body += [_curve("plain", steps, plain, low, high, top, bottom), _curve("ours", steps, ours, low, high, top, bottom)]

    top, bottom = bottom + _GAP, bottom + _GAP + _DIFFERENCES
    differences = [math.log10(max(step.difference, 1e-9)) for step in report.steps]
    bound = math.log10(report.bound)
    low, high = math.floor(min(differences)), math.ceil(max(*differences, bound))
    spread = [low + place for place in range(high - low + 1) if (high - low) < 5 or place % 2 == 0]
    body += _levels(spread, low, high, top, bottom, "1e{:+.0f}")
    body.append(_curve("apart", steps, differences, low, high, top, bottom))
    y = _y(bound, low, high, top, bottom)
    body.append(f'<line class="bound" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
    body += [
        f'<text x="{_LEFT}" y="18">loss by step: mindvl (thin) over plain transformers (wide), {report.phase}, '
        f"{report.precision}</text>",
        f'<text x="{_LEFT}" y="{top - 10}">relative difference; mean {report.mean_difference:.1e}, bound of the mean '
        f"{report.bound:.0e} (dashed)</text>",
        f'<text x="{_LEFT}" y="{height - 8}">step {steps[0]}</text>',
        f'<text x="{_WIDTH - _RIGHT}" y="{height - 8}" text-anchor="end">{steps[-1]}</text>',
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'role="img"><title>Loss of mindvl and of plain transformers</title><style>{_STYLE}</style>'
        f"{''.join(body)}</svg>\n"
    )


def _y(value: float, low: float, high: float, top: float, bottom: float) -> float:
    return bottom - (value - low) / (high - low) * (bottom - top)


def _levels(values: Sequence[float], low: float, high: float, top: float, bottom: float, label: str) -> list[str]:
    lines = []
    for value in values:
        y = _y(value, low, high, top, bottom)
        lines.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        lines.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label.format(value)}</text>')
    return lines


def _curve(
    kind: str, steps: Sequence[int], values: Sequence[float], low: float, high: float, top: float, bottom: float
) -> str:
    span = max(1, steps[-1] - steps[0])
    points = " ".join(
        f"{_LEFT + (step - steps[0]) / span * (_WIDTH - _LEFT - _RIGHT):.1f},{_y(value, low, high, top, bottom):.1f}"
        for step, value in zip(steps, values, strict=True)
    )
    return f'<polyline class="{kind}" points="{points}"/>'
