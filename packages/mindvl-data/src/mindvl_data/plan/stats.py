# SPDX-License-Identifier: Apache-2.0
"""What a configuration will give: fill, visual load, imbalance, tokens by source, drops; from the plan alone.

Stands beside the planner; nothing is decoded, so a thousand rows take seconds.
"""

from typing import Any

import numpy as np

from mindvl_data.config import DataConfig
from mindvl_data.plan.planner import Planner, Row, rows_of_rank
from mindvl_data.plan.sources import SourceIndex
from mindvl_data.shards.files import ShardFiles
from mindvl_data.tokenization import load_tokenizer


def plan_stats(config: DataConfig, *, num_rows: int, dp_size: int = 8, microbatches: int = 8) -> dict[str, Any]:
    """Figures of at least `num_rows` rows of the plan, in whole steps of `dp_size * microbatches` rows.

    Returns:
        `rank_imbalance` is how much longer the busiest rank works on pictures than the average one, per step;
        `lockstep_imbalance` the same when ranks wait for each other after every microbatch. Both are None when there
        are fewer rows than one step.
    """
    files = ShardFiles(config.store)
    try:
        tokenizer = load_tokenizer(config.tokenizer)
        sources = [SourceIndex(source, config, tokenizer, files) for source in config.sources]
        rows_per_step = dp_size * microbatches
        planner = Planner(config, sources, rows_per_step=rows_per_step)
        steps: list[tuple[Row, ...]] = []
        while len(steps) * rows_per_step < num_rows and (step := planner.next_step()) is not None:
            steps.append(step.rows)
    finally:
        files.close()
    figures = planner.figures(planner.state())
    rank, lockstep = _imbalance(steps, dp_size)
    return figures | {
        "samples_per_row": figures["samples"] / max(1, figures["rows"]),
        "rank_imbalance": rank,
        "lockstep_imbalance": lockstep,
        "dp_size": dp_size,
        "microbatches": microbatches,
    }


def _imbalance(steps: list[tuple[Row, ...]], dp_size: int) -> tuple[float | None, float | None]:
    ranks, locks = [], []
    for step in steps:
        if not all(step):
            continue  # the end of the data: its empty rows say nothing about balance
        dealt = [rows_of_rank(step, dp_rank=rank, dp_size=dp_size) for rank in range(dp_size)]
        load = np.array([[sum(sample.patches for sample in row) for row in rows] for rows in dealt], np.float64)
        if load.any():
            sums = load.sum(axis=1)
            ranks.append(sums.max() / sums.mean() - 1)
            locks.append(load.max(axis=0).sum() / load.mean(axis=0).sum() - 1)
    return (float(np.mean(ranks)), float(np.mean(locks))) if ranks else (None, None)
