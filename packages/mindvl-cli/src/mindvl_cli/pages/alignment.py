# SPDX-License-Identifier: Apache-2.0
"""The figure of `mindvl check alignment`: two loss curves on each other, and below their relative difference.

Comes after mindvl_train.checks.alignment. Documents show the file as an image.
"""

from typing import TYPE_CHECKING

from mindvl_cli.pages.plots import compared_losses

if TYPE_CHECKING:
    from mindvl_train.checks.alignment import AlignmentReport


def alignment_svg(report: "AlignmentReport") -> str:
    """An SVG file: losses by step, ours thin over the plain ones, and their relative difference on a log scale."""
    steps = report.steps
    return compared_losses(
        [step.step for step in steps],
        [step.loss for step in steps],
        [step.plain_loss for step in steps],
        [step.difference for step in steps],
        bound=report.bound,
        titles=(
            f"loss by step: mindvl (thin) over plain transformers (wide), {report.phase}, {report.precision}",
            f"relative difference: mean {report.mean_difference:.1e}, bound of the mean {report.bound:.0e} (dashed)",
        ),
        describe="Loss of mindvl and of plain transformers",
    ).svg()
