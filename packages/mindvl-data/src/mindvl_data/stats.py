# SPDX-License-Identifier: Apache-2.0
"""What a configuration will give: fill, visual load, imbalance, tokens by source, drops; from the plan alone.

Stands beside the planner; nothing is decoded, so a thousand rows take seconds.
"""

from collections import Counter
from typing import Any

import numpy as np

from mindvl_data.config import DataConfig
from mindvl_data.lengths import SourceIndex
from mindvl_data.planner import Planner, Row, rows_of_rank
from mindvl_data.shards import ShardFiles
from mindvl_data.tokenization import load_tokenizer


def plan_stats(config: DataConfig, *, num_rows: int, dp_size: int = 8, microbatches: int = 8) -> dict[str, Any]:
    """Figures of the first `num_rows` rows of the plan, cut into steps of `dp_size * microbatches` rows.

    Returns:
        `rank_imbalance` is how much longer the busiest rank works on pictures than the average one, per step;
        `lockstep_imbalance` the same when ranks wait for each other after every microbatch. Both are None when there
        are fewer rows than one step.
    """
    files = ShardFiles()
    try:
        tokenizer = load_tokenizer(config.tokenizer)
        sources = [SourceIndex(source, config.image, tokenizer, files) for source in config.sources]
        rows_per_step = dp_size * microbatches
        planner = Planner(config, sources, rows_per_step=rows_per_step)
        steps: list[tuple[Row, ...]] = []
        while len(steps) * rows_per_step < num_rows and (step := planner.next_step()) is not None:
            steps.append(step.rows)
    finally:
        files.close()
    rows = [row for step in steps for row in step if row][:num_rows]
    per_token = config.image.spatial_merge_size**2
    visual = np.array([sum(sample.patches for sample in row) // per_token for row in rows] or [0], np.float64)
    tokens = np.array([sum(sample.length for sample in row) for row in rows] or [0], np.float64)
    tokens_by_source: Counter[str] = Counter()
    for row in rows:
        for sample in row:
            tokens_by_source[sources[sample.source].name] += sample.length
    rank, lockstep = _imbalance(steps, dp_size)
    return {
        "rows": len(rows),
        "samples": sum(len(row) for row in rows),
        "samples_per_row": sum(len(row) for row in rows) / max(1, len(rows)),
        "tokens": int(tokens.sum()),
        "fill": float(tokens.mean()) / config.packing.seq_length,
        "visual_tokens": {
            "mean": float(visual.mean()),
            "max": int(visual.max()),
            "cv": float(visual.std() / visual.mean()) if visual.mean() else 0.0,
            "limit": planner.max_patches // per_token,
        },
        "rank_imbalance": rank,
        "lockstep_imbalance": lockstep,
        "dp_size": dp_size,
        "microbatches": microbatches,
        "tokens_by_source": dict(tokens_by_source),
        "samples_by_source": dict(planner.drawn),
        "dropped": dict(planner.dropped),
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
