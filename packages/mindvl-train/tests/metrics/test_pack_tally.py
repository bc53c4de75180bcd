# SPDX-License-Identifier: Apache-2.0
"""Packs are counted by what is in them, padding left out."""

from collections.abc import Callable
from dataclasses import replace

from mindvl_data import Loader
from mindvl_model.flops import pack_flops
from mindvl_model.testing.tiny import smallest_config
from mindvl_train import RunConfig
from mindvl_train.metrics.pack_tally import PackTally, RunFacts

FACTS = RunFacts(model=smallest_config(vocab_size=264), sources=("pages", "photos", "text"), seq_length=96)


def test_counts_are_those_of_the_samples(make_config: Callable[..., RunConfig]) -> None:
    with Loader(make_config().data, global_batch_size=2, position_kind="rope") as loader:
        packs = [next(loader) for _ in range(4)]
    tally = PackTally(FACTS)
    tally.add_step(packs[:2])
    tally.add_step(packs[2:])
    segments = [segment for pack in packs for segment in pack.segments]
    images = int(sum(pack.image_grid_thw.prod(dim=1).sum() for pack in packs))
    assert tally.counts.packs == 4
    assert tally.counts.samples == len(segments) > 4
    assert tally.counts.sample_tokens == sum(segment.length for segment in segments)
    assert tally.counts.visual_tokens == images // 4 > 0
    assert sum(tally.tokens_by_source) == tally.counts.sample_tokens
    assert tally.tokens_by_source[2] == sum(segment.length for segment in segments if segment.source == "text")
    whole = sum(
        pack_flops(
            FACTS.model, [s.length for s in pack.segments], [tuple(g) for g in pack.image_grid_thw.tolist()]
        ).total
        for pack in packs
    )
    assert len(tally.work) == 2
    assert round(1e12 * sum(map(sum, tally.work))) == whole


def test_a_class_is_source_and_modality_and_a_bad_sample_is_none_of_the_counted(
    make_config: Callable[..., RunConfig],
) -> None:
    with Loader(make_config().data, global_batch_size=1, position_kind="rope") as loader:
        pack = next(loader)
    first, second, *rest = pack.segments
    changed = replace(
        pack,
        segments=(
            replace(first, source="text", num_images=0),
            replace(second, source="photos", num_images=1, num_videos=1, bad=True),
            *rest,
        ),
    )
    tally = PackTally(FACTS)
    assert tally.classes(changed)[:2] == [6, 5]
    tally.add_step([changed])
    assert tally.counts.samples == len(pack.segments) - 1
