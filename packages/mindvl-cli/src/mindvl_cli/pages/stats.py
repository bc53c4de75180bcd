# SPDX-License-Identifier: Apache-2.0
"""`mindvl data stats --out`: what a mixture will give, as one page with plots.

Comes after mindvl_data.order.stats, whose figures it draws; see there for what each one means.
"""

from typing import Any

from mindvl_cli.pages.charts import histogram, paired_bars
from mindvl_cli.pages.page import page, section, table, tile

_MAX_BARS = 24  # sources drawn; the table has all of them


def stats_page(figures: dict[str, Any], *, title: str) -> str:
    """The whole page from `order_stats`."""
    visual, waits = figures["visual_tokens"], figures["staleness"]
    layout = f"{figures['dp_size']} ranks, {figures['microbatches']} micro-batches"
    tiles = [
        tile(
            percent(figures["packing_efficiency"]),
            "packing efficiency",
            f"{figures['packs']:,} packs, {figures['samples']:,} samples",
        ),
        tile(percent(figures["rank_imbalance"]), "rank imbalance", layout),
        tile(percent(figures["lockstep_imbalance"]), "lock-step imbalance", "ranks wait after every micro-batch"),
        tile(f"{waits['p99']:,.0f} packs", "longest wait of 99 % of samples", f"most {waits['max']:,}"),
    ]
    load = histogram(
        figures["visual_load"]["edges"],
        figures["visual_load"]["counts"],
        x_label="visual tokens per pack",
        limit=visual["limit"],
        describe="How many packs have how many visual tokens",
    )
    sources = figures["sources"]
    shown = sorted(sources, key=lambda source: -max(source["asked"], source["tokens_share"]))[:_MAX_BARS]
    unit = "samples_share" if figures["weight_unit"] == "samples" else "tokens_share"
    shares = paired_bars(
        [(source["name"], source["asked"], source[unit]) for source in shown],
        names=(f"asked, of {figures['weight_unit']}", "planned"),
        describe="Share of each source, asked and planned",
    )
    body = [
        f'<header><h1>{title}</h1><p>From the plan alone, before anything is decoded.</p><div class="tiles">'
        f"{''.join(tiles)}</div></header>",
        section(
            "Images per pack",
            f'<div class="pair"><figure>{load}</figure>{_efficiency_table(figures["packing_efficiency_histogram"])}</div>',
            lead=f"On average {visual['mean']:,.0f} visual tokens, at most {visual['max']:,}; the dashed line is the "
            f"limit of {visual['limit']:,}.",
        ),
        section("Sources", f"<figure>{shares}</figure>{_source_table(sources)}"),
        section(
            "Imbalance on other numbers of ranks",
            _imbalance_table(figures["imbalance"]),
            lead="How much longer the busiest rank works on images than the average one: over a whole step, and when "
            f"ranks wait for each other after every micro-batch. Packs of {figures['balance_steps']} steps are balanced "
            f"together, {figures['balance_width']} side by side.",
        ),
        section("Left out", _drop_table(sources)),
    ]
    return page(title, "".join(body))


def percent(value: float | None) -> str:
    """A share with two digits; a dash where there is none."""
    return "-" if value is None else f"{100 * value:.2f} %"


def _efficiency_table(fill: dict[str, list[float]]) -> str:
    edges, total = fill["edges"], max(1, int(sum(fill["counts"])))
    packs = [
        (f"{100 * low:g} to {100 * high:g} %", f"{int(count):,}", percent(count / total))
        for low, high, count in zip(edges, edges[1:], fill["counts"], strict=False)
        if count
    ]
    return table(["packing efficiency", "packs", "share"], packs[::-1])


def _source_table(sources: list[dict[str, Any]]) -> str:
    packs = [
        (
            source["name"],
            percent(source["asked"]),
            f"{source['samples']:,}",
            percent(source["samples_share"]),
            f"{source['tokens']:,}",
            percent(source["tokens_share"]),
        )
        for source in sources
    ]
    return table(["source", "asked", "samples", "of samples", "tokens", "of tokens"], packs)


def _imbalance_table(packs: list[dict[str, Any]]) -> str:
    cells = [
        (str(pack["dp_size"]), str(pack["microbatches"]), percent(pack["rank"]), percent(pack["lockstep"]))
        for pack in packs
    ]
    return table(["ranks", "micro-batches", "whole step", "lock-step"], cells)


def _drop_table(sources: list[dict[str, Any]]) -> str:
    packs = [
        (source["name"], reason, f"{count:,}") for source in sources for reason, count in source["dropped"].items()
    ]
    return table(["source", "reason", "samples"], packs) if packs else ""
