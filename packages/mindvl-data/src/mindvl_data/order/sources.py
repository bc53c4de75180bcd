# SPDX-License-Identifier: Apache-2.0
"""One source of the mixture: its index, its rules, and the lengths that follow from them.

Comes after index and measuring, before the data order. It stores nothing per sample: lengths are read for the requested
samples, so hundreds of sources of any size need little memory.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindvl_data.config import DataConfig, SampleRules, SourceConfig, source_image
from mindvl_data.measure import Lengths, is_measured, sample_lengths, shard_lengths
from mindvl_data.order.subset import Subset
from mindvl_data.shards.files import ShardFiles
from mindvl_data.shards.index import DirectoryIndex, open_index
from mindvl_data.shards.reading import read_sample
from mindvl_data.tokenization import Tokenizer
from mindvl_data.types import RawSample

_MAPPED_SHARDS = 128  # index files that stay mapped, over all sources; each holds a descriptor


class SourceIndex:
    """One source of the mixture."""

    def __init__(self, source: SourceConfig, config: DataConfig, tokenizer: Tokenizer, files: ShardFiles) -> None:
        self.name = source.name
        self.weight = source.weight
        self.max_epochs = source.max_epochs
        self.index: DirectoryIndex = open_index(
            source.path, store=config.store, max_mapped=max(1, _MAPPED_SHARDS // len(config.sources))
        )
        self.rules = source_rules(source, config)
        self.subset = Subset(self.index.shards.sizes, first=source.first, fraction=source.fraction, source=source.name)
        self.tokenizer = tokenizer
        self.files = files
        self._keeps_lengths = True  # False once the directory turned out to be read-only

    @property
    def num_samples(self) -> int:
        """Samples of one epoch."""
        return self.subset.num_samples

    def lengths(self, shard: int) -> Lengths:
        """(tokens, patches) of every sample of a shard, used or not; 0 tokens marks a sample that cannot be used."""
        return shard_lengths(self.index.shards[shard], rules=self.rules, tokenizer=self.tokenizer, files=self.files)

    def lengths_of(self, shard: int, rows: NDArray[Any]) -> Lengths:
        """(tokens, patches) of some samples of a shard.

        A shard that was not measured yet is measured completely if the lengths can be stored, otherwise these samples only.
        """
        index = self.index.shards[shard]
        where: dict[str, Any] = {"rules": self.rules, "tokenizer": self.tokenizer, "files": self.files}
        if self._keeps_lengths and not is_measured(index, **where):
            tokens, patches = shard_lengths(index, **where)
            self._keeps_lengths = is_measured(index, **where)
            return tokens[rows], patches[rows]
        return sample_lengths(index, rows, **where)

    def used_rows(self, shard: int) -> NDArray[np.int64]:
        """The rows of a shard that belong to the source; all of them without `first` and `fraction`."""
        return self.subset.rows(shard, np.arange(self.subset.sizes[shard]))

    def read(self, shard: int, row: int) -> RawSample:
        """The bytes of one sample, in one range read."""
        return read_sample(self.index.shards[shard], row, self.files)


def source_rules(source: SourceConfig, config: DataConfig) -> SampleRules:
    """How samples of one source become tokens and patches."""
    packing = config.packing
    return SampleRules(
        image=source_image(config.image, source),
        video=config.video,
        max_tokens=packing.seq_length if packing.overflow == "trim_turns" else None,
    )
