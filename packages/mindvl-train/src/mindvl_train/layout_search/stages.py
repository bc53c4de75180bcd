# SPDX-License-Identifier: Apache-2.0
"""The blocks of each chunk of the pipeline, and how many decoder layers each chunk should have.

Comes after decoder.py and vision_encoder.py, before memory.py and step_time.py. Chunk c stands on pipeline rank c % pp_size; the
first has vision encoder, projector and embedding, the last the head, its loss and multi-token prediction.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from mindvl_model.parallel_config import ParallelConfig
from mindvl_train.layout_search.blocks import Block, Setting
from mindvl_train.layout_search.decoder import decoder_layer, embedding_block, head_block, mtp_block
from mindvl_train.layout_search.vision_encoder import vision_blocks

Run = tuple[Block, int]  # a block and how many times it is repeated


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """What stands in one chunk, in the order it runs."""

    key: tuple[object, ...]  # equal for chunks of one Parts that hold the same
    before: tuple[Run, ...]  # vision encoder, projector, embedding
    layers: tuple[Run, ...]  # decoder layers
    after: tuple[Run, ...]  # multi-token prediction, head

    @property
    def runs(self) -> tuple[Run, ...]:
        """All of it."""
        return self.before + self.layers + self.after

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return sum(count for _, count in self.layers)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The blocks of a whole model, before they are put on stages."""

    before: tuple[Run, ...]
    layers: tuple[Block, ...]
    after: tuple[Run, ...]
    copy: Block | None  # the embedding again, on a last stage that needs it too

    def chunks(self, counts: Sequence[int]) -> list[Chunk]:
        """Chunks of so many decoder layers each."""
        result, first = [], 0
        for place, count in enumerate(counts):
            is_last = place == len(counts) - 1
            own_copy = ((self.copy, 1),) if self.copy is not None and is_last and place else ()
            layers = runs_of(self.layers[first : first + count])
            result.append(
                Chunk(
                    key=(place == 0, is_last, *((block.name, count) for block, count in layers)),
                    before=self.before if place == 0 else (),
                    layers=layers,
                    after=own_copy + self.after if is_last else (),
                )
            )
            first += count
        return result


def runs_of(blocks: Sequence[Block]) -> tuple[Run, ...]:
    """Equal neighbours counted."""
    return tuple((block, len(list(group))) for block, group in groupby(blocks))


def parts_of(setting: Setting) -> Parts:
    """All blocks of the model in this setting."""
    language = setting.model.language
    embedding, prediction = embedding_block(setting), mtp_block(setting)
    layers: dict[str, Block] = {}
    decoder = []
    for number in range(language.num_layers):
        layer = decoder_layer(setting, number) if number in (0, language.num_layers - 1) or not layers else None
        if layer is None:
            # Layers differ between the dense ones at the start and the rest only.
            layer = layers["last"] if number >= getattr(language, "num_dense_layers", 0) else layers["first"]
        elif number == 0:
            layers["first"], layers["last"] = layer, decoder_layer(setting, language.num_layers - 1)
        decoder.append(layer)
    needs_copy = prediction is not None or language.tie_embeddings
    copy = None
    if needs_copy:
        copy = Block(name="embedding", part="language", dense=embedding.dense, trained=embedding.trained)
    return Parts(
        before=runs_of([*vision_blocks(setting), embedding]),
        layers=tuple(decoder),
        after=runs_of([*([prediction] if prediction is not None else []), head_block(setting)]),
        copy=copy,
    )


def balanced_counts(parts: Parts, parallel: ParallelConfig, cost: Callable[[Block], float]) -> tuple[int, ...] | None:
    """Decoder layers of each chunk, so that the dearest pipeline rank is as cheap as can be.

    Layers go, one after the other, to the rank that is cheapest with one more; of its chunks to the one that has
    fewest. What stands before and after counts, so the first and last get fewer.

    Returns:
        None where there are more chunks than layers, a first or last one without any left aside.
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
    for chunk in range(1, chunks - 1):  # only a chunk that has something else may do without a layer
        counts[chunk] += 1
        load[chunk % size] += layer
    for _ in range(total - sum(counts)):
        rank = min(range(size), key=lambda place: (load[place], -place))
        chunk = min(range(rank, chunks, size), key=lambda place: counts[place])
        counts[chunk] += 1
        load[rank] += layer
    return tuple(counts)
