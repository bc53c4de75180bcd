# SPDX-License-Identifier: Apache-2.0
"""The page of `mindvl analyze routing`: hit rates of a cache of experts, as curves and tables."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mindvl_cli.pages.plots import line
from mindvl_cli.pages.render import render

if TYPE_CHECKING:
    from mindvl_model.routing import RoutingScore


def routing_page(figures: dict[str, Any], scores: "Sequence[RoutingScore]") -> str:
    """The page as HTML.

    Args:
        figures: What the command prints as JSON.
        scores: As RoutingAnalysis.scores returns them.
    """
    overall = [score for score in scores if (score.source, score.modality) == ("all", "all")]
    of_modality = [score for score in scores if score.source == "all" and score.modality != "all"]
    curves = [
        line(
            score.curve,
            x_label="cache size",
            describe=f"SCH, {score.modality} tokens, windows of {score.segment_length}",
        )
        for score in overall + of_modality
    ]
    by_layer = [
        (f"SRP by layer, windows of {score.segment_length}", [(one.layer, one.srp) for one in score.layers])
        for score in overall
    ]
    by_layer += [
        (
            f"SCH by layer, windows of {score.segment_length}, cache of {score.cache_sizes[-1]:g}x",
            [(one.layer, one.hit_rates[-1]) for one in score.layers],
        )
        for score in overall
    ]
    rows = [
        (
            score.source,
            score.modality,
            str(score.segment_length),
            f"{score.windows:,}",
            f"{score.srp:.3f}",
            f"{score.group_size:.2f}x",
            *(f"{hit:.1%}" for hit in score.hit_rates),
        )
        for score in scores
    ]
    return render(
        "routing",
        f=figures,
        overall=overall,
        curves=curves,
        layers=[line(points, x_label="layer", describe=title) for title, points in by_layer],
        head=["source", "tokens", "window", "windows", "SRP", "group", *(f"SCH {s:g}x" for s in scores[0].cache_sizes)],
        rows=rows,
    )
