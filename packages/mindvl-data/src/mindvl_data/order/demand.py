# SPDX-License-Identifier: Apache-2.0
"""Averages of the mixture: mean tokens per sample, patches per token, and the largest number of patches of a sample.

Comes after the sources, before the packer, which uses them as targets. They are computed from evenly spaced samples,
because reading the index of a hundred million samples takes a minute. The sums are computed once per source and stored
next to its index as integers, so that every rank and restart gets the same values.
"""

import hashlib
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mindvl_data.config import DataConfig
from mindvl_data.measure import sample_lengths
from mindvl_data.order.sources import SourceIndex
from mindvl_data.shards.atomic import write_atomically
from mindvl_data.shards.location import join, sidecar_path
from mindvl_data.shards.manifest import MANIFEST_NAME
from mindvl_data.shards.sealed import SealError, seal, unseal

logger = logging.getLogger(__name__)

_VERSION = 3  # raised when the same source gives other numbers
_SHARDS, _ROWS = 32, 64  # shards of a source that are read, and samples of each
_MAX_BYTES = 4096  # limit of a stored file, which has a few hundred


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Sums over the samples read that fit into a pack."""

    samples: int
    tokens: int
    patches: int
    largest: int  # patches of one of the samples read; other samples can have more

    @property
    def mean_tokens(self) -> float:
        return self.tokens / self.samples if self.samples else 0.0

    @property
    def mean_patches(self) -> float:
        return self.patches / self.samples if self.samples else 0.0


def mixture_demand(
    sources: Sequence[SourceIndex], weights: Sequence[float], config: DataConfig
) -> tuple[float, float, int]:
    """(tokens per sample, patches per token, largest number of patches of the samples read) of the mixture.

    Args:
        weights: Shares in the unit `config.weight_unit`.
    """
    return combine([source_demand(source, config) for source in sources], weights, weight_unit=config.weight_unit)


def combine(demands: Sequence[Demand], weights: Sequence[float], *, weight_unit: str) -> tuple[float, float, int]:
    """`mixture_demand` from the demands of the sources; the same for every version of Python and numpy."""
    shares = [
        weight if weight_unit == "samples" or not demand.tokens else weight / demand.mean_tokens
        for weight, demand in zip(weights, demands, strict=True)
    ]
    samples = math.fsum(share for share, demand in zip(shares, demands, strict=True) if demand.tokens)
    tokens = math.fsum(share * demand.mean_tokens for share, demand in zip(shares, demands, strict=True))
    patches = math.fsum(share * demand.mean_patches for share, demand in zip(shares, demands, strict=True))
    largest = max(demand.largest for demand in demands)
    return (tokens / samples, patches / tokens, largest) if tokens else (1.0, 0.0, largest)


def source_demand(source: SourceIndex, config: DataConfig) -> Demand:
    """The demand of one source, read from the file next to its index, or computed and stored there."""
    path = _path(source, config)
    try:
        return Demand(**unseal(path, max_bytes=_MAX_BYTES))
    except (OSError, SealError, TypeError):  # not computed yet, or the file is damaged
        demand = _find(source, config)
    try:
        write_atomically(path, seal(asdict(demand)))
    except OSError as error:  # data directories are often read-only
        logger.warning(
            "%s: the averages of source %s cannot be stored (%s). They are computed at every start.",
            path,
            source.name,
            error,
        )
    return demand


def _find(source: SourceIndex, config: DataConfig) -> Demand:
    logger.info("computing the averages of source %s (%d samples)", source.name, source.num_samples)
    limit = config.packing.seq_length
    shards = np.flatnonzero(source.subset.sizes)
    tokens, patches = [], []
    for shard in _spread(shards, _SHARDS).tolist():
        rows = source.subset.rows(shard, _spread(np.arange(source.subset.sizes[shard]), _ROWS))
        pair = sample_lengths(
            source.index.shards[shard], rows, rules=source.rules, tokenizer=source.tokenizer, files=source.files
        )
        tokens.append(pair[0].astype(np.int64))
        patches.append(pair[1].astype(np.int64))
    all_tokens, all_patches = np.concatenate(tokens), np.concatenate(patches)
    fits = (all_tokens > 0) & (all_tokens <= limit)
    fitting = all_patches[fits]
    return Demand(
        samples=int(fits.sum()),
        tokens=int(all_tokens[fits].sum()),
        patches=int(fitting.sum()),
        largest=int(fitting.max(initial=0)),
    )


def _spread(values: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """At most `count` of the values, evenly spaced, first and last among them; in whole numbers, unlike linspace."""
    count = min(count, len(values))
    return values[np.arange(count) * (len(values) - 1) // max(1, count - 1)]


def _path(source: SourceIndex, config: DataConfig) -> Path:
    parts = [
        _VERSION, source.index.identity, source.tokenizer.identity, repr(source.rules), config.packing.seq_length,
        source.name, hashlib.sha256(source.subset.sizes.tobytes()).hexdigest(),
    ]  # fmt: skip
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    return sidecar_path(join(source.index.directory, MANIFEST_NAME), f"demand-{digest}.json", source.files.store)
