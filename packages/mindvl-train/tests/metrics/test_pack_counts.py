# SPDX-License-Identifier: Apache-2.0
"""Packs are counted by what is in them, padding left out."""

from collections.abc import Callable
from dataclasses import replace

from mindvl_data import Loader
from mindvl_model.flops import pack_flops
from mindvl_model.testing.tiny import smallest_config
from mindvl_train import RunConfig
from mindvl_train.metrics.pack_counts import PackCounter, RunFacts

FACTS = RunFacts(model=smallest_config(vocab_size=264), sources=("pages", "photos", "text"), seq_length=96)


def test_counts_are_those_of_the_samples(make_config: Callable[..., RunConfig]) -> None:
    with Loader(make_config().data, global_batch_size=2, position_kind="rope") as loader:
        packs = [next(loader) for _ in range(4)]
    tally = PackCounter(FACTS)
    tally.add_step(packs[:2])
    tally.add_step(packs[2:])
    samples = [sample for pack in packs for sample in pack.samples]
    images = int(sum(pack.image_grid_thw.prod(dim=1).sum() for pack in packs))
    assert tally.counts.packs == 4
    assert tally.counts.samples == len(samples) > 4
    assert tally.counts.sample_tokens == sum(sample.length for sample in samples)
    assert tally.counts.visual_tokens == images // 4 > 0
    assert sum(tally.tokens_by_source) == tally.counts.sample_tokens
    assert tally.tokens_by_source[2] == sum(sample.length for sample in samples if sample.source == "text")
    whole = sum(
        pack_flops(
            FACTS.model,
            [s.length for s in pack.samples],
            [tuple(g) for g in pack.image_grid_thw.tolist()],
            num_loss_tokens=int((pack.labels != -100).sum()),
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
    first, second, *rest = pack.samples
    changed = replace(
        pack,
        samples=(
            replace(first, source="text", num_images=0),
            replace(second, source="photos", num_images=1, num_videos=1, failed=True),
            *rest,
        ),
    )
    tally = PackCounter(FACTS)
    assert tally.classes(changed)[:2] == [6, 5]
    tally.add_step([changed])
    assert tally.counts.samples == len(pack.samples) - 1
