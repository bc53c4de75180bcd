# SPDX-License-Identifier: Apache-2.0
"""Shards that are both in the training data and in the validation data.

Comes before the first step and in the dry run. Shards are compared by the checksum of their index, which covers every
key, size and content, so a copy of a shard in another directory is found too. Only manifests are read.
"""

from collections.abc import Iterator, Sequence

from mindvl_data import SourceConfig, StoreConfig
from mindvl_data.shards.index import open_index
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
    return f"validation.sources: {len(both)} shards are also trained on: {'; '.join(both[:_SHOWN])}{more}"


REMEDY = (
    "Move shards that are held out to a directory of their own and index both directories again, or set "
    "validation.allow_overlap=true to accept it."
)


def _shards(sources: Sequence[SourceConfig], store: StoreConfig) -> Iterator[tuple[str, str, str]]:
    """Name of the source, name of the shard and digest of each shard with samples."""
    for source in sources:
        shards = open_index(source.path, store=store).shards
        yield from ((source.name, name, digest) for name, digest in zip(shards.names, shards.digests, strict=True))
