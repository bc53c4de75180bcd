# SPDX-License-Identifier: Apache-2.0
"""Stats: figures of the plan agree with what the loader hands out."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mindvl_data import DataConfig, Loader
from mindvl_data.order.stats import expected_imbalance, order_stats

MakeConfig = Callable[..., DataConfig]


def test_the_figures_are_those_of_the_packs(make_config: MakeConfig) -> None:
    config = make_config()
    figures = order_stats(config, num_packs=16, dp_size=2, microbatches=2)
    with Loader(config, global_batch_size=4, position_kind="rope") as loader:
        batches = [next(loader) for _ in range(16)]
        report = loader.report()
    tokens: Counter[str] = Counter()
    for batch in batches:
        for segment in batch.samples:
            tokens[segment.source] += segment.length
    assert figures["tokens_by_source"] == tokens == report["tokens_by_source"]
    assert figures["packing_efficiency"] == pytest.approx(report["packing_efficiency"])
    assert figures["visual_tokens"] == report["visual_tokens"]
    loads = [len(batch.pixel_values) // 4 for batch in batches]
    rank, lockstep = [], []
    for start in range(0, 16, 4):
        step = loads[start : start + 4]
        ranks = [step[0] + step[2], step[1] + step[3]]
        rank.append(max(ranks) / (sum(ranks) / 2) - 1)
        lockstep.append((max(step[:2]) + max(step[2:])) / (sum(step) / 2) - 1)
    assert figures["rank_imbalance"] == pytest.approx(sum(rank) / 4)
    assert figures["lockstep_imbalance"] == pytest.approx(sum(lockstep) / 4)
    assert figures["imbalance"][0] == {
        "dp_size": 2, "microbatches": 2, "rank": figures["rank_imbalance"], "lockstep": figures["lockstep_imbalance"],
    }  # fmt: skip
    counts, edges = figures["visual_load"]["counts"], figures["visual_load"]["edges"]
    assert sum(counts) == 16
    assert counts[0] == sum(load < edges[1] for load in loads)
    filled = [sum(segment.length for segment in batch.samples) / 256 for batch in batches]
    assert figures["packing_efficiency_histogram"]["counts"][-1] == sum(fill >= 0.999 for fill in filled)


def test_data_that_ends_early_is_counted_once(make_config: MakeConfig) -> None:
    figures = order_stats(make_config(max_epochs=1), num_packs=10_000, dp_size=1, microbatches=1)
    assert figures["samples"] == 100
    assert figures["samples_by_source"] == {"images": 60, "text": 40}


def by_name(figures: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {source["name"]: source for source in figures["sources"]}


def test_shares_got_stand_beside_shares_asked(make_config: MakeConfig) -> None:
    figures = order_stats(make_config(text_share=0.25), num_packs=160, dp_size=2, microbatches=4)
    text, images = by_name(figures)["text"], by_name(figures)["images"]
    assert (text["asked"], images["asked"]) == (0.25, 0.75)
    assert text["is_text"]
    assert not images["is_text"]
    assert text["samples_share"] == pytest.approx(0.25, abs=0.02)
    assert text["tokens_share"] + images["tokens_share"] == pytest.approx(1)


def test_drops_are_listed_by_source_and_reason(make_config: MakeConfig) -> None:
    config = make_config(max_epochs=1)
    figures = order_stats(replace(config, packing=replace(config.packing, max_patches=20)), num_packs=999)
    dropped = by_name(figures)["images"]["dropped"]
    assert set(dropped) == {"too many patches"}
    assert dropped["too many patches"] + figures["samples_by_source"]["images"] == 60
    assert by_name(figures)["text"]["dropped"] == {}


def test_waits_are_measured_and_stay_below_their_limit(make_config: MakeConfig) -> None:
    config = make_config()
    figures = order_stats(config, num_packs=200, dp_size=2, microbatches=2)
    waits = figures["staleness"]
    assert waits["limit"] == 16 + 4 * 4
    assert 0 < waits["mean"] <= waits["p99"] <= waits["max"] <= waits["limit"]
    alone = replace(config, packing=replace(config.packing, buffer_size=1, balance_steps=1))
    assert order_stats(alone, num_packs=50, dp_size=1, microbatches=1)["staleness"]["max"] == 0


def test_all_values_can_be_written_as_json(make_config: MakeConfig) -> None:
    figures = order_stats(make_config(), num_packs=8, dp_size=2, microbatches=2)
    assert json.loads(json.dumps(figures)) == figures


def test_the_expected_imbalance_falls_with_a_group_as_wide_as_the_ranks(make_config: MakeConfig) -> None:
    narrow, wide, long = expected_imbalance(
        make_config(), num_packs=32, global_batch_size=128, dp_size=16, settings=((2, 4), (16, 4), (16, 16))
    )
    assert narrow is not None
    assert wide is not None
    assert long is not None
    assert narrow[0] > 0.02 > wide[0] > 0
    assert long[1] < wide[1] / 2  # groups of a longer window hold packs that are more similar
    assert wide[1] >= wide[0]


def test_data_without_images_have_no_imbalance(make_config: MakeConfig) -> None:
    text = make_config(text_share=1.0)
    assert expected_imbalance(text, num_packs=8, global_batch_size=16, dp_size=4, settings=((1, 4),)) == [None]
