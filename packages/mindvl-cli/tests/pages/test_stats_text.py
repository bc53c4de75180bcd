# SPDX-License-Identifier: Apache-2.0
"""Tests of the tables of `mindvl data stats`."""

import pytest

from mindvl_cli.pages.stats_text import print_stats


def test_packs_and_sources_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    source = {
        "name": "pages",
        "asked": 0.25,
        "samples": 1200,
        "samples_share": 0.5,
        "tokens": 4000,
        "tokens_share": 0.125,
    }
    figures = {
        "packs": 1000,
        "samples_per_pack": 1.25,
        "packing_efficiency": 0.75,
        "visual_tokens": {"mean": 12.4, "max": 30, "limit": 40, "cv": 0.5},
        "dp_size": 8,
        "microbatches": 4,
        "rank_imbalance": 0.1,
        "lockstep_imbalance": 0.2,
        "staleness": {"mean": 3.0, "p99": 7.0, "max": 9},
        "weight_unit": "samples",
        "sources": [source | {"dropped": {"too long": 1500}}],
    }
    print_stats(figures)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "packs 1,000"
    assert "visual tokens mean 12, max 30, limit 40" in lines
    assert "packs until a sample is placed mean 3, p99 7, max 9" in lines
    assert lines[-1].startswith("pages ")
    assert lines[-1].endswith("1,500 too long")
    assert " 1,200 " in lines[-1]
