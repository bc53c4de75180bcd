# SPDX-License-Identifier: Apache-2.0
"""Tests of the page of `data stats`: every figure it was given stands on it."""

import xml.etree.ElementTree as ElementTree
from typing import Any

from mindvl_cli.pages.stats import stats_page

SOURCE: dict[str, Any] = {
    "name": "photos <1>", "asked": 0.75, "samples": 30, "samples_share": 0.75, "tokens": 900, "tokens_share": 0.9,
    "dropped": {"too long": 4},
}  # fmt: skip
FIGURES: dict[str, Any] = {
    "packs": 12, "samples": 40, "packing_efficiency": 0.9987, "rank_imbalance": 0.01, "lockstep_imbalance": None, "dp_size": 2,
    "microbatches": 3, "balance_steps": 4, "balance_width": 8, "weight_unit": "samples",
    "visual_tokens": {"mean": 55.0, "max": 80, "limit": 100, "cv": 0.1},
    "staleness": {"mean": 1.0, "p99": 7.0, "max": 9, "limit": 20},
    "visual_load": {"edges": [0, 50, 100], "counts": [5, 7]},
    "packing_efficiency_histogram": {"edges": [0.0, 0.99, 1.0], "counts": [2, 10]},
    "imbalance": [{"dp_size": 2, "microbatches": 3, "rank": 0.01, "lockstep": 0.02}],
    "sources": [SOURCE, SOURCE | {"name": "text", "asked": 0.25, "samples_share": 0.25, "dropped": {}}],
}  # fmt: skip


def test_the_page_shows_shares_loads_and_what_was_left_out() -> None:
    page = stats_page(FIGURES, title="Data of a.yaml")
    root = ElementTree.fromstring(page.partition("<body>")[2].partition("</body>")[0].strip())
    text = " ".join(root.itertext())
    for part in ("99.87%", "1.00%", "photos <1>", "too long", "at most 80", "99 to 100%", "83.33%"):
        assert part in text, part
    assert len(list(root.iter("svg"))) == 2


def test_a_section_without_drops_is_left_out() -> None:
    quiet = FIGURES | {"sources": [SOURCE | {"dropped": {}}]}
    assert "Dropped samples" in stats_page(FIGURES, title="t")
    assert "Dropped samples" not in stats_page(quiet, title="t")
