# SPDX-License-Identifier: Apache-2.0
"""Statistics of the data order: packing efficiency, visual load, imbalance, staleness, shares, dropped samples.

Nothing is decoded, so a thousand packs take seconds.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindvl_data.config import DataConfig
from mindvl_data.order.balance import balance_order
from mindvl_data.order.data_order import DataOrder, OrderedSample, Pack, packs_of_rank
from mindvl_data.order.sources import SourceIndex
from mindvl_data.shards.files import ShardFiles
from mindvl_data.tokenization import load_tokenizer

_LOAD_BINS = 24
_EFFICIENCY_EDGES = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 1.0)
_RANKS = (2, 4, 8, 16, 32, 64)


def order_stats(config: DataConfig, *, num_packs: int, dp_size: int = 8, microbatches: int = 8) -> dict[str, Any]:
    """Statistics of at least `num_packs` packs of the data order, in whole steps of `dp_size * microbatches` packs.

    Returns:
        JSON values: those of `DataOrder.figures`, and:

        `samples_per_pack`: mean.
        `dp_size`, `microbatches`: as given. `balance_steps`, `balance_width`: of the configuration.
        `rank_imbalance`: how much longer the busiest rank works on images than the average one, per step, as a
            share; `lockstep_imbalance`: the same when ranks wait for each other after every microbatch. Mean over
            steps; None where no whole step has an image.
        `imbalance`: the same for other numbers of ranks, a list of `dp_size`, `microbatches`, `rank`, `lockstep`.
        `visual_load`: histogram over packs, `edges` [bins + 1] in visual tokens and `counts` [bins].
        `packing_efficiency_histogram`: histogram over packs, `edges` as a share of the pack (the last bin
            holds full packs) and `counts`.
        `staleness`: packs between drawing a sample and the pack that holds it: `mean`, `p99`, `max`, and the `limit`
            that no sample exceeds (buffer and window).
        `sources`: a list in the order of the configuration of `name`, `asked` (share of the mixture, in the unit of
            `weight_unit`), `samples`, `samples_share`, `tokens`, `tokens_share`, and `dropped` (count by reason).
            Text-only sources have `is_text`.
        `weight_unit`: "samples" or "tokens".
    """
    global_batch_size = dp_size * microbatches
    drawn_before: dict[OrderedSample, int] = {}
    files = ShardFiles(config.store)
    try:
        tokenizer = load_tokenizer(config.tokenizer)
        sources = [SourceIndex(source, config, tokenizer, files) for source in config.sources]
        data_order = DataOrder(config, sources, global_batch_size=global_batch_size, on_draw=drawn_before.__setitem__)
        steps: list[tuple[Pack, ...]] = []
        while len(steps) * global_batch_size < num_packs and (step := data_order.next_step()) is not None:
            steps.append(step.packs)
    finally:
        files.close()
    figures = data_order.figures(data_order.state())
    packs = [pack for step in steps for pack in step]
    per_token = config.image.spatial_merge_size**2
    load = np.array([sum(sample.patches for sample in pack) for pack in packs], np.int64).reshape(-1, global_batch_size)
    # Steps with empty packs, at the end of the data, are not balanced.
    load_of_whole = load[[all(step) for step in steps]]
    rank, lockstep = _imbalance(load_of_whole, dp_size)
    packing = config.packing
    return figures | {
        "samples_per_pack": figures["samples"] / max(1, figures["packs"]),
        "dp_size": dp_size,
        "microbatches": microbatches,
        "balance_steps": packing.balance_steps,
        "balance_width": packing.balance_width,
        "rank_imbalance": rank,
        "lockstep_imbalance": lockstep,
        "imbalance": _imbalance_table(load_of_whole, global_batch_size),
        "visual_load": _load_histogram([pack for pack in packs if pack], per_token, data_order.max_patches),
        "packing_efficiency_histogram": _efficiency_histogram([pack for pack in packs if pack], packing.seq_length),
        "staleness": _staleness(packs, drawn_before)
        | {"limit": packing.buffer_size + packing.balance_steps * global_batch_size},
        "sources": _by_source(sources, data_order.shares, figures),
        "weight_unit": config.weight_unit,
    }


def expected_imbalance(
    config: DataConfig, *, num_packs: int, global_batch_size: int, dp_size: int, settings: Sequence[tuple[int, int]]
) -> list[tuple[float, float] | None]:
    """(rank, lock-step) imbalance as in `order_stats` for pairs of `packing.balance_width` and `packing.balance_steps`.

    Only `num_packs` packs are built. The balance window of a whole step is filled with packs that are drawn from them
    with a fixed seed, so the result is an estimate. None where no pack has an image.
    """
    sample = replace(config, packing=replace(config.packing, balance_steps=1))
    files = ShardFiles(config.store)
    try:
        tokenizer = load_tokenizer(config.tokenizer)
        sources = [SourceIndex(source, sample, tokenizer, files) for source in config.sources]
        step = DataOrder(sample, sources, global_batch_size=num_packs).next_step()
    finally:
        files.close()
    packs = [pack for pack in step.packs if pack] if step is not None else []
    seen = np.array([sum(one.patches for one in pack) for pack in packs] or [0], np.int64)
    found = []
    for width, steps in settings:
        loads = np.random.default_rng(0).choice(seen, steps * global_batch_size)
        order = (
            balance_order(loads, global_batch_size=global_batch_size, width=width)
            if steps > 1
            else np.arange(len(loads))
        )
        rank, lockstep = _imbalance(loads[order].reshape(-1, global_batch_size), dp_size)
        found.append(None if rank is None or lockstep is None else (rank, lockstep))
    return found


def _imbalance(load: NDArray[np.int64], dp_size: int) -> tuple[float | None, float | None]:
    """(rank, lock-step) imbalance of [num_steps, global_batch_size] patches, assigned as in `packs_of_rank`."""
    load = load[load.any(axis=1)]
    if not load.size:
        return None, None
    by_rank = [packs_of_rank(list(load.T), dp_rank=rank, dp_size=dp_size) for rank in range(dp_size)]
    assigned = np.array(by_rank, np.float64)  # [dp_size, microbatches, num_steps]
    sums = assigned.sum(axis=1)
    rank = sums.max(axis=0) / sums.mean(axis=0) - 1
    lockstep = assigned.max(axis=0).sum(axis=0) / assigned.mean(axis=0).sum(axis=0) - 1
    return float(rank.mean()), float(lockstep.mean())


def _imbalance_table(load: NDArray[np.int64], global_batch_size: int) -> list[dict[str, Any]]:
    table = []
    for dp_size in _RANKS:
        if global_batch_size % dp_size == 0:
            rank, lockstep = _imbalance(load, dp_size)
            microbatches = global_batch_size // dp_size
            table.append({"dp_size": dp_size, "microbatches": microbatches, "rank": rank, "lockstep": lockstep})
    return table


def _load_histogram(packs: Sequence[Pack], per_token: int, limit: int) -> dict[str, list[Any]]:
    load = [sum(sample.patches for sample in pack) / per_token for pack in packs]
    counts, edges = np.histogram(load, bins=_LOAD_BINS, range=(0, max(1, limit / per_token)))
    return {"edges": edges.tolist(), "counts": counts.tolist()}


def _efficiency_histogram(packs: Sequence[Pack], seq_length: int) -> dict[str, list[Any]]:
    fill = [sum(sample.length for sample in pack) / seq_length for pack in packs]
    counts, edges = np.histogram(fill, bins=_EFFICIENCY_EDGES)
    return {"edges": edges.tolist(), "counts": counts.tolist()}


def _staleness(packs: Sequence[Pack], drawn_before: dict[OrderedSample, int]) -> dict[str, Any]:
    # Balancing can move a pack before the packs built when its samples were drawn: their wait is 0.
    waits = [max(0, number - drawn_before[sample]) for number, pack in enumerate(packs) for sample in pack]
    if not waits:
        return {"mean": 0.0, "p99": 0.0, "max": 0}
    return {"mean": float(np.mean(waits)), "p99": float(np.quantile(waits, 0.99)), "max": max(waits)}


def _by_source(
    sources: Sequence[SourceIndex], shares: Sequence[float], figures: dict[str, Any]
) -> list[dict[str, Any]]:
    samples, tokens = Counter(figures["samples_by_source"]), Counter(figures["tokens_by_source"])
    dropped: dict[str, dict[str, int]] = {source.name: {} for source in sources}
    for where, count in figures["dropped"].items():
        name, _, reason = where.rpartition(": ")
        dropped[name][reason] = count
    return [
        {
            "name": source.name,
            "is_text": source.index.is_text,
            "asked": share,
            "samples": samples[source.name],
            "samples_share": samples[source.name] / max(1, samples.total()),
            "tokens": tokens[source.name],
            "tokens_share": tokens[source.name] / max(1, tokens.total()),
            "dropped": dropped[source.name],
        }
        for source, share in zip(sources, shares, strict=True)
    ]
