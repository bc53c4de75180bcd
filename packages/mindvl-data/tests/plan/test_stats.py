# SPDX-License-Identifier: Apache-2.0
"""Stats: figures of the plan agree with what the loader hands out."""

from collections import Counter
from collections.abc import Callable

import pytest

from mindvl_data import DataConfig, Loader
from mindvl_data.plan.stats import plan_stats


def test_the_figures_are_those_of_the_rows(make_config: Callable[..., DataConfig]) -> None:
    config = make_config()
    figures = plan_stats(config, num_rows=16, dp_size=2, microbatches=2)
    with Loader(config, packs_per_step=4, position_kind="rope") as loader:
        batches = [next(loader) for _ in range(16)]
        report = loader.report()
    tokens: Counter[str] = Counter()
    for batch in batches:
        for segment in batch.segments:
            tokens[segment.source] += segment.length
    assert figures["tokens_by_source"] == tokens == report["tokens_by_source"]
    assert figures["fill"] == pytest.approx(report["fill"])
    assert figures["visual_tokens"] == report["visual_tokens"]
    loads = [len(batch.pixel_values) // 4 for batch in batches]
    imbalance = []
    for start in range(0, 16, 4):
        ranks = [loads[start] + loads[start + 2], loads[start + 1] + loads[start + 3]]
        imbalance.append(max(ranks) / (sum(ranks) / 2) - 1)
    assert figures["rank_imbalance"] == pytest.approx(sum(imbalance) / 4)


def test_data_that_ends_early_is_counted_once(make_config: Callable[..., DataConfig]) -> None:
    figures = plan_stats(make_config(max_epochs=1), num_rows=10_000, dp_size=1, microbatches=1)
    assert figures["samples"] == 100
    assert figures["samples_by_source"] == {"pictures": 60, "text": 40}
