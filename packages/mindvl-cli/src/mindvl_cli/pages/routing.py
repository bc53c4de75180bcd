# SPDX-License-Identifier: Apache-2.0
"""The page of `mindvl analyze routing`: what a cache of experts would serve, as curves and tables."""

from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from mindvl_cli.pages.charts import line_chart
from mindvl_cli.pages.page import page, section, table, tile

if TYPE_CHECKING:
    from mindvl_model.routing import RoutingScore


def routing_page(figures: dict[str, Any], scores: "Sequence[RoutingScore]") -> str:
    """A whole document.

    Args:
        figures: What the command prints as JSON.
        scores: As RoutingAnalysis.scores gives them.
    """
    overall = [score for score in scores if (score.source, score.modality) == ("all", "all")]
    of_modality = [score for score in scores if score.source == "all" and score.modality != "all"]
    tiles = [
        tile(f"{figures['packs']:,}", "packs", f"{figures['tokens']:,} tokens"),
        tile(f"{figures['experts_per_token']} of {figures['experts']}", "experts", f"{len(figures['layers'])} layers"),
        *(
            tile(f"{100 * score.hit_rates[-1]:.1f} %", f"SCH, windows of {score.segment_length}", _cache(score))
            for score in overall
        ),
    ]
    body = (
        f"<h1>Routing of {escape(figures['model'])}</h1><p>over {escape(figures['data'])}</p>"
        f'<div class="tiles">{"".join(tiles)}</div>'
        + section(
            "Hit rate by cache size",
            _charts(overall + of_modality, _curve),
            lead="Share of wanted experts that the best cache for each window holds; its size in multiples of the "
            "experts that a token is sent to.",
        )
        + section(
            "By layer",
            _charts(overall, _srp_by_layer) + _charts(overall, _hits_by_layer),
            lead="Each layer alone, with a threshold and a cache of its own.",
        )
        + section("By source and kind of token", _table(scores))
    )
    return page("Routing", body)


def _charts(scores: "Sequence[RoutingScore]", draw: Callable[["RoutingScore"], tuple[str, str]]) -> str:
    figures = "".join(
        f"<figure><figcaption><b>{escape(title)}</b></figcaption>{chart}</figure>" for title, chart in map(draw, scores)
    )
    return f'<div class="curves">{figures}</div>'


def _curve(score: "RoutingScore") -> tuple[str, str]:
    title = f"SCH, {score.modality} tokens, windows of {score.segment_length}"
    return title, line_chart(score.curve, x_label="cache size", describe=title)


def _srp_by_layer(score: "RoutingScore") -> tuple[str, str]:
    title = f"SRP by layer, windows of {score.segment_length}"
    return title, line_chart([(one.layer, one.srp) for one in score.layers], x_label="layer", describe=title)


def _hits_by_layer(score: "RoutingScore") -> tuple[str, str]:
    title = f"SCH by layer, windows of {score.segment_length}, {_cache(score)}"
    points = [(one.layer, one.hit_rates[-1]) for one in score.layers]
    return title, line_chart(points, x_label="layer", describe=title)


def _cache(score: "RoutingScore") -> str:
    return f"cache of {score.cache_sizes[-1]:g}x"


def _table(scores: "Sequence[RoutingScore]") -> str:
    head = ("source", "tokens", "window", "windows", "SRP", "group", *(f"SCH {s:g}x" for s in scores[0].cache_sizes))
    packs = [
        (
            score.source,
            score.modality,
            str(score.segment_length),
            f"{score.windows:,}",
            f"{score.srp:.3f}",
            f"{score.group_size:.2f}x",
            *(f"{100 * hit:.1f} %" for hit in score.hit_rates),
        )
        for score in scores
    ]
    return table(head, packs)
