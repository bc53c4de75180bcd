# SPDX-License-Identifier: Apache-2.0
"""The blocks of each model chunk, and a balanced number of decoder layers per chunk.

Comes after decoder.py and vision_encoder.py, before memory.py and step_time.py. Chunk c is on pipeline rank
c % pp_size; the first has vision encoder, projector and embedding, the last the head, its loss and multi-token prediction.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from mindvl_model.parallel_config import ParallelConfig
from mindvl_train.layout_search.adapters import Adapters
from mindvl_train.layout_search.blocks import Block, Setting
from mindvl_train.layout_search.decoder import decoder_layer, embedding_block, head_block, mtp_block
from mindvl_train.layout_search.vision_encoder import vision_blocks

Run = tuple[Block, int]  # a block and its number of repetitions


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """The blocks of one chunk in execution order."""

    key: tuple[object, ...]  # equal for chunks with equal blocks
    before: tuple[Run, ...]  # vision encoder, projector, embedding
    layers: tuple[Run, ...]  # decoder layers
    after: tuple[Run, ...]  # multi-token prediction, head

    @property
    def runs(self) -> tuple[Run, ...]:
        """All blocks."""
        return self.before + self.layers + self.after

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return sum(count for _, count in self.layers)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The blocks of a whole model."""

    before: tuple[Run, ...]
    layers: tuple[Block, ...]
    after: tuple[Run, ...]
    copy: Block | None  # copy of the embedding on the last stage, if that needs it

    def chunks(self, counts: Sequence[int]) -> list[Chunk]:
        """Split into chunks with these numbers of decoder layers."""
        result, first = [], 0
        for index, count in enumerate(counts):
            is_last = index == len(counts) - 1
            own_copy = ((self.copy, 1),) if self.copy is not None and is_last and index else ()
            layers = runs_of(self.layers[first : first + count])
            result.append(
                Chunk(
                    key=(index == 0, is_last, *((block.name, count) for block, count in layers)),
                    before=self.before if index == 0 else (),
                    layers=layers,
                    after=own_copy + self.after if is_last else (),
                )
            )
            first += count
        return result


def runs_of(blocks: Sequence[Block]) -> tuple[Run, ...]:
    """Consecutive equal blocks with their counts."""
    return tuple((block, len(list(group))) for block, group in groupby(blocks))


def parts_of(setting: Setting) -> Parts:
    """All blocks of the model."""
    language = setting.model.language
    embedding, prediction = embedding_block(setting), mtp_block(setting)
    layers: dict[str, Block] = {}
    decoder = []
    for number in range(language.num_layers):
        layer = decoder_layer(setting, number) if number in (0, language.num_layers - 1) or not layers else None
        if layer is None:
            # Only the dense layers at the start differ from the others.
            layer = layers["last"] if number >= language.num_dense_layers else layers["first"]
        elif number == 0:
            layers["first"], layers["last"] = layer, decoder_layer(setting, language.num_layers - 1)
        decoder.append(layer)
    needs_copy = prediction is not None or language.tie_embeddings
    copy = None
    if needs_copy:
        copy = Block(name="embedding", part="language", dense=embedding.dense, trained=embedding.trained)
    after = [*([prediction] if prediction is not None else []), head_block(setting)]
    before = [*vision_blocks(setting), embedding]
    if setting.lora is not None:
        with_adapters = Adapters(setting)
        before, after = [with_adapters(block) for block in before], [with_adapters(block) for block in after]
        decoder = [with_adapters(block, number) for number, block in enumerate(decoder)]
        copy = None if copy is None else with_adapters(copy)
    return Parts(before=runs_of(before), layers=tuple(decoder), after=runs_of(after), copy=copy)


def balanced_counts(parts: Parts, parallel: ParallelConfig, cost: Callable[[Block], float]) -> tuple[int, ...] | None:
    """Decoder layers of each chunk that minimize the cost of the most expensive pipeline rank.

    Each layer is assigned to the rank with the lowest cost, and there to the chunk with the fewest layers. Vision encoder
    and head are included in the cost, so the first and last chunks have fewer layers.

    Returns:
        None if there are more chunks than layers; the first and last chunk may have none.
    """
    size, chunks = parallel.pp_size, parallel.pp_size * parallel.virtual_stages
    total = len(parts.layers)
    if chunks == 1:
        return (total,)
    if total < chunks - 2:
        return None
    layer = sum(count * cost(block) for block, count in runs_of(parts.layers)) / total
    counts = [0] * chunks
    load = [0.0] * size
    load[0] += sum(count * cost(block) for block, count in parts.before)
    load[(chunks - 1) % size] += sum(count * cost(block) for block, count in parts.after)
    for chunk in range(1, chunks - 1):  # only the first and last chunk may have no layer
        counts[chunk] += 1
        load[chunk % size] += layer
    for _ in range(total - sum(counts)):
        rank = min(range(size), key=lambda rank: (load[rank], -rank))
        chunk = min(range(rank, chunks, size), key=lambda chunk: counts[chunk])
        counts[chunk] += 1
        load[rank] += layer
    return tuple(counts)
