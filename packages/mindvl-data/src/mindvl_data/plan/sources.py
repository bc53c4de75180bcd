# SPDX-License-Identifier: Apache-2.0
"""One source of the mixture: its index, its rules, and the lengths that follow from them.

Comes after index and measuring, before the planner, which knows samples only through it.
"""

from mindvl_data.config import DataConfig, SampleRules, SourceConfig, source_image
from mindvl_data.measure import Lengths, shard_lengths
from mindvl_data.shards.files import ShardFiles
from mindvl_data.shards.index import FolderIndex, open_index
from mindvl_data.shards.reading import read_sample
from mindvl_data.tokenization import Tokenizer
from mindvl_data.types import RawSample


class SourceIndex:
    """One source of the mixture."""

    def __init__(self, source: SourceConfig, config: DataConfig, tokenizer: Tokenizer, files: ShardFiles) -> None:
        self.name = source.name
        self.weight = source.weight
        self.max_epochs = source.max_epochs
        self.index: FolderIndex = open_index(source.path)
        self.rules = source_rules(source, config)
        self._tokenizer = tokenizer
        self._files = files
        self._cache: dict[int, Lengths] = {}
        self.shard_sizes = [len(shard.samples) for shard in self.index.shards]

    def lengths(self, shard: int) -> Lengths:
        """(tokens, patches) of each sample of a shard; 0 tokens marks a sample that cannot be used."""
        if shard not in self._cache:
            self._cache[shard] = shard_lengths(
                self.index.shards[shard], rules=self.rules, tokenizer=self._tokenizer, files=self._files
            )
        return self._cache[shard]

    def read(self, shard: int, row: int) -> RawSample:
        """The bytes of one sample, in one range read."""
        return read_sample(self.index.shards[shard], row, self._files)


def source_rules(source: SourceConfig, config: DataConfig) -> SampleRules:
    """How samples of one source become tokens and patches."""
    packing = config.packing
    return SampleRules(
        image=source_image(config.image, source),
        video=config.video,
        max_tokens=packing.seq_length if packing.overflow == "trim_turns" else None,
    )
