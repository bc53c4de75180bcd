# SPDX-License-Identifier: Apache-2.0
"""The shards of the validation data: how many samples they have, and whether the run also trains on them.

Comes before the first step and in the dry run. Shards are compared by the checksum of their index, which covers every
key, size and content, so a copy of a shard in another directory is found too. Only manifests are read.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from mindvl_data import DataError, SourceConfig
from mindvl_data.config import StoreConfig
from mindvl_data.order.subset import Subset
from mindvl_data.shards.index import open_index
from mindvl_train.config import RunConfig
from mindvl_train.validation.config import ValidationConfig

_SHOWN = 3


def overlap(training: Sequence[SourceConfig], validation: ValidationConfig, store: StoreConfig) -> str | None:
    """A message that names shards in both, without what to do; None if there are none.

    Raises:
        DataError: A source is not indexed.
    """
    trained = {digest: f"{shard} of training source {source}" for source, shard, digest in _shards(training, store)}
    both = [
        f"{shard} of validation source {source} is {trained[digest]}"
        for source, shard, digest in _shards(validation.sources, store)
        if digest in trained
    ]
    if not both:
        return None
    more = f" and {len(both) - _SHOWN} more" if len(both) > _SHOWN else ""
    counted = "1 shard is" if len(both) == 1 else f"{len(both)} shards are"
    return f"validation.sources: {counted} also trained on: {'; '.join(both[:_SHOWN])}{more}"


REMEDY = (
    "Move shards that are held out to a directory of their own and index both directories again, or set "
    "validation.allow_overlap=true to accept it."
)


def validation_facts(config: RunConfig, problems: list[str]) -> dict[str, Any] | None:
    """What a run validates, for the dry run; None without a `validation` section.

    Args:
        problems: Reasons why the run could not start on this machine; shards in both data sections are added.
    """
    validation = config.validation
    if validation is None:
        return None
    samples: dict[str, int] = {}
    try:
        for source in validation.sources:
            index = open_index(source.path, store=config.data.store)
            subset = Subset(index.shards.sizes, first=source.first, fraction=source.fraction, source=source.name)
            samples[source.name] = subset.num_samples
        problem = overlap(config.data.sources, validation, config.data.store)
    except (DataError, OSError) as error:  # a missing directory is another problem of the dry run
        known = any(one.startswith(("validation.sources", "data.sources")) for one in problems)
        problem = None if known else f"validation.sources: {error}"
    else:
        problem = None if problem is None or validation.allow_overlap else f"{problem}. {REMEDY}"
    if problem is not None:
        problems.append(problem)
    return {
        "samples": samples,
        "every_steps": validation.every_steps,
        "max_packs": validation.max_packs,
        "measure": validation.measure,
        "patience": validation.patience,
        "keep_best": config.checkpoints.keep_best,
    }


def _shards(sources: Sequence[SourceConfig], store: StoreConfig) -> Iterator[tuple[str, str, str]]:
    """Name of the source, name of the shard and digest of each shard with samples."""
    for source in sources:
        shards = open_index(source.path, store=store).shards
        yield from ((source.name, name, digest) for name, digest in zip(shards.names, shards.digests, strict=True))
