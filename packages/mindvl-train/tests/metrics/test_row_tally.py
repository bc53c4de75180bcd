# SPDX-License-Identifier: Apache-2.0
"""Rows are counted by what is in them, padding left out."""

from collections.abc import Callable
from dataclasses import replace

from mindvl_data import Loader
from mindvl_model.flops import row_flops
from mindvl_model.testing.tiny import smallest_config
from mindvl_train import RunConfig
from mindvl_train.metrics.row_tally import RowTally, RunFacts

FACTS = RunFacts(model=smallest_config(vocab_size=264), sources=("pages", "photos", "text"), seq_length=96)


def test_counts_are_those_of_the_samples(make_config: Callable[..., RunConfig]) -> None:
    with Loader(make_config().data, packs_per_step=2, position_kind="rope") as loader:
        rows = [next(loader) for _ in range(4)]
    tally = RowTally(FACTS)
    tally.add_step(rows[:2])
    tally.add_step(rows[2:])
    segments = [segment for row in rows for segment in row.segments]
    images = int(sum(row.image_grid_thw.prod(dim=1).sum() for row in rows))
    assert tally.counts.rows == 4
    assert tally.counts.samples == len(segments) > 4
    assert tally.counts.sample_tokens == sum(segment.length for segment in segments)
    assert tally.counts.visual_tokens == images // 4 > 0
    assert sum(tally.tokens_by_source) == tally.counts.sample_tokens
    assert tally.tokens_by_source[2] == sum(segment.length for segment in segments if segment.source == "text")
    whole = sum(
        row_flops(FACTS.model, [s.length for s in row.segments], [tuple(g) for g in row.image_grid_thw.tolist()]).total
        for row in rows
    )
    assert len(tally.work) == 2
    assert round(1e12 * sum(map(sum, tally.work))) == whole


def test_a_class_is_source_and_modality_and_a_bad_sample_is_none_of_the_counted(
    make_config: Callable[..., RunConfig],
) -> None:
    with Loader(make_config().data, packs_per_step=1, position_kind="rope") as loader:
        row = next(loader)
    first, second, *rest = row.segments
    changed = replace(
        row,
        segments=(
            replace(first, source="text", num_images=0),
            replace(second, source="photos", num_images=1, num_videos=1, bad=True),
            *rest,
        ),
    )
    tally = RowTally(FACTS)
    assert tally.classes(changed)[:2] == [6, 5]
    tally.add_step([changed])
    assert tally.counts.samples == len(row.segments) - 1
