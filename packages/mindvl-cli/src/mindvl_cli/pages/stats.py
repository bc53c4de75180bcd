# SPDX-License-Identifier: Apache-2.0
"""The page of `mindvl data stats --out`: what a mixture will contain, with plots.

Comes after mindvl_data.order.stats, which defines every figure.
"""

from typing import Any

from mindvl_cli.pages.plots import histogram, paired_bars
from mindvl_cli.pages.render import render, share_text

_MAX_BARS = 24  # sources drawn; the table has all of them


def stats_page(figures: dict[str, Any], *, title: str) -> str:
    """The page of what `order_stats` returned, as HTML."""
    sources = figures["sources"]
    shown = sorted(sources, key=lambda source: -max(source["asked"], source["tokens_share"]))[:_MAX_BARS]
    unit = "samples_share" if figures["weight_unit"] == "samples" else "tokens_share"
    fill, total = (
        figures["packing_efficiency_histogram"],
        max(1, int(sum(figures["packing_efficiency_histogram"]["counts"]))),
    )
    fill_rows = [
        (f"{100 * low:g} to {100 * high:g}%", f"{int(count):,}", f"{count / total:.2%}")
        for low, high, count in zip(fill["edges"], fill["edges"][1:], fill["counts"], strict=False)
        if count
    ]
    return render(
        "stats",
        title=title,
        f=figures,
        load=histogram(
            **figures["visual_load"],
            x_label="visual tokens in a packed sequence",
            limit=figures["visual_tokens"]["limit"],
            describe="Number of packed sequences by their visual tokens",
        ),
        shares=paired_bars(
            [(source["name"], source["asked"], source[unit]) for source in shown],
            names=(f"requested share of {figures['weight_unit']}", "share in the data order"),
            describe="Requested share and share in the data order of each source",
        ),
        fill_rows=fill_rows[::-1],
        source_rows=[
            (
                source["name"],
                f"{source['asked']:.2%}",
                f"{source['samples']:,}",
                f"{source['samples_share']:.2%}",
                f"{source['tokens']:,}",
                f"{source['tokens_share']:.2%}",
            )
            for source in sources
        ],
        imbalance_rows=[
            (row["dp_size"], row["microbatches"], share_text(row["rank"]), share_text(row["lockstep"]))
            for row in figures["imbalance"]
        ],
        dropped_rows=[
            (source["name"], reason, f"{count:,}") for source in sources for reason, count in source["dropped"].items()
        ],
    )
