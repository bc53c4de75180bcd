# SPDX-License-Identifier: Apache-2.0
"""What the mixture asks of a row: mean tokens of a sample, patches per token, the most patches that samples have.

Comes after the sources, before the packer, which steers by it. All three are those of an evenly spaced sample of rows:
looking at the index of a hundred million samples takes a minute. They are found once per source and kept beside its
index. Every rank and every restart finds the same numbers.
"""

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mindvl_data.config import DataConfig
from mindvl_data.measure import row_lengths
from mindvl_data.plan.sources import SourceIndex
from mindvl_data.shards.index import MANIFEST_NAME, write_atomically
from mindvl_data.shards.location import beside, join

logger = logging.getLogger(__name__)

_VERSION = 2  # raised when the same source would give other numbers
_SHARDS, _ROWS = 32, 64  # shards of a source looked at, and rows of each


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Of the samples that fit into a row."""

    mean_tokens: float
    mean_patches: float
    largest: int  # patches; of the rows looked at, others can have more


def mixture_demand(
    sources: Sequence[SourceIndex], weights: Sequence[float], config: DataConfig
) -> tuple[float, float, int]:
    """(tokens per sample, patches per token, most patches of the samples looked at) of the mixture.

    Args:
        weights: Shares that count what `config.weight_unit` says.
    """
    demands = [source_demand(source, config) for source in sources]
    shares = [
        weight if config.weight_unit == "samples" or not demand.mean_tokens else weight / demand.mean_tokens
        for weight, demand in zip(weights, demands, strict=True)
    ]
    samples = sum(share for share, demand in zip(shares, demands, strict=True) if demand.mean_tokens)
    tokens = sum(share * demand.mean_tokens for share, demand in zip(shares, demands, strict=True))
    patches = sum(share * demand.mean_patches for share, demand in zip(shares, demands, strict=True))
    largest = max(demand.largest for demand in demands)
    return (tokens / samples, patches / tokens, largest) if tokens else (1.0, 0.0, largest)


def source_demand(source: SourceIndex, config: DataConfig) -> Demand:
    """The demand of one source: from the file beside its index where there is one, else found and kept there."""
    path = _path(source, config)
    try:
        return Demand(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):  # never found, or the file is not whole
        demand = _find(source, config)
    try:
        write_atomically(path, json.dumps(asdict(demand)).encode())
    except OSError as error:  # data folders are often read-only
        logger.warning(
            "figures of source %s cannot be kept as %s (%s); they are found at every start", source.name, path, error
        )
    return demand


def _find(source: SourceIndex, config: DataConfig) -> Demand:
    logger.info("looking at the index of source %s (%d samples), once", source.name, source.num_samples)
    limit = config.packing.seq_length
    shards = np.flatnonzero(source.subset.sizes)
    tokens, patches = [], []
    for shard in _spread(shards, _SHARDS).tolist():
        rows = source.subset.rows(shard, _spread(np.arange(source.subset.sizes[shard]), _ROWS))
        pair = row_lengths(
            source.index.shards[shard], rows, rules=source.rules, tokenizer=source.tokenizer, files=source.files
        )
        tokens.append(pair[0].astype(np.int64))
        patches.append(pair[1].astype(np.int64))
    all_tokens, all_patches = np.concatenate(tokens), np.concatenate(patches)
    fits = (all_tokens > 0) & (all_tokens <= limit)
    if not fits.any():
        return Demand(mean_tokens=0.0, mean_patches=0.0, largest=0)
    fitting = all_patches[fits]
    return Demand(
        mean_tokens=float(all_tokens[fits].mean()),
        mean_patches=float(fitting.mean()),
        largest=int(fitting.max()),
    )


def _spread(values: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """At most `count` of the values, evenly spaced, first and last among them."""
    return values[np.unique(np.linspace(0, len(values) - 1, min(count, len(values))).astype(np.int64))]


def _path(source: SourceIndex, config: DataConfig) -> Path:
    parts = [
        _VERSION, source.index.identity, source.tokenizer.identity, repr(source.rules), config.packing.seq_length,
        source.name, hashlib.sha256(source.subset.sizes.tobytes()).hexdigest(),
    ]  # fmt: skip
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    return beside(join(source.index.folder, MANIFEST_NAME), f"demand-{digest}.json", source.files.store)
