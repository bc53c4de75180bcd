# SPDX-License-Identifier: Apache-2.0
"""The tables of `mindvl data stats`.

Comes after mindvl_data.order.stats, which defines every figure.
"""

from typing import Any

from mindvl_cli.units import percent_text as percent


def print_stats(figures: dict[str, Any]) -> None:
    """Print the result of `order_stats`: one table of the packs, one of the sources."""
    from rich.console import Console
    from rich.table import Table

    visual, waits = figures["visual_tokens"], figures["staleness"]
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_row("packs", f"{figures['packs']:,}")
    table.add_row("samples per pack", f"{figures['samples_per_pack']:.1f}")
    table.add_row("packing efficiency", percent(figures["packing_efficiency"]))
    table.add_row("visual tokens", f"mean {visual['mean']:.0f}, max {visual['max']}, limit {visual['limit']}")
    table.add_row("variation of visual tokens", f"{visual['cv']:.3f}")
    layout = f"{figures['dp_size']} ranks, {figures['microbatches']} microbatches"
    table.add_row(f"imbalance, {layout}", percent(figures["rank_imbalance"]))
    table.add_row("imbalance with a wait per microbatch", percent(figures["lockstep_imbalance"]))
    table.add_row(
        "packs until a sample is placed", f"mean {waits['mean']:.0f}, p99 {waits['p99']:.0f}, max {waits['max']}"
    )
    Console(markup=False).print(table)
    sources = Table(box=None, pad_edge=False)
    for number, name in enumerate(
        ("source", f"requested, {figures['weight_unit']}", "samples", "", "tokens", "", "dropped")
    ):
        sources.add_column(name, justify="left" if number in (0, 6) else "right")
    for source in figures["sources"]:
        dropped = ", ".join(f"{count:,} {reason}" for reason, count in source["dropped"].items())
        sources.add_row(
            source["name"],
            percent(source["asked"]),
            f"{source['samples']:,}",
            percent(source["samples_share"]),
            f"{source['tokens']:,}",
            percent(source["tokens_share"]),
            dropped,
        )
    Console(markup=False).print(sources)
