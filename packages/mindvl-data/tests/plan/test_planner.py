# SPDX-License-Identifier: Apache-2.0
"""Planner: shares, order, epochs, its state; without reading any content."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from PIL import Image

from mindvl_data import (
    DataConfig,
    DataError,
    ImageConfig,
    PackingConfig,
    SourceConfig,
    Tokenizer,
    index_folder,
    write_shards,
)
from mindvl_data.plan.planner import PlannedSample, Planner, rows_of_rank
from mindvl_data.plan.sources import SourceIndex
from mindvl_data.shards.files import ShardFiles

MakeConfig = Callable[..., DataConfig]


@pytest.fixture
def make_planner(tokenizer: Tokenizer) -> Iterator[Callable[..., Planner]]:
    files = ShardFiles()

    def make(config: DataConfig, rows_per_step: int = 2) -> Planner:
        sources = [SourceIndex(s, config, tokenizer, files) for s in config.sources]
        return Planner(config, sources, rows_per_step=rows_per_step)

    yield make
    files.close()


def samples(planner: Planner, steps: int) -> list[PlannedSample]:
    planned = [planner.next_step() for _ in range(steps)]
    return [sample for step in planned if step is not None for row in step.rows for sample in row]


def test_the_text_share_holds(make_planner: Callable[..., Planner], make_config: MakeConfig) -> None:
    planner = make_planner(make_config(text_share=0.2))
    samples(planner, 60)
    drawn = planner.drawn
    assert drawn["text"] / drawn.total() == pytest.approx(0.2, abs=1 / drawn.total())


def test_weights_can_count_tokens(make_planner: Callable[..., Planner], make_config: MakeConfig) -> None:
    planned = samples(make_planner(make_config(weight_unit="tokens")), 80)
    tokens: Counter[int] = Counter()
    for sample in planned:
        tokens[sample.source] += sample.length
    assert tokens[0] / tokens.total() == pytest.approx(0.5, abs=0.03)  # the buffer holds the rest


def test_each_epoch_of_a_source_has_another_order(
    make_planner: Callable[..., Planner], make_config: MakeConfig
) -> None:
    config = make_config(max_epochs=2)
    planned = samples(make_planner(config), 500)
    by_epoch = [[(s.shard, s.row) for s in planned if (s.source, s.epoch) == (1, epoch)] for epoch in (0, 1)]
    assert sorted(by_epoch[0]) == sorted(by_epoch[1])
    assert by_epoch[0] != by_epoch[1]


def test_a_plan_can_be_taken_up_from_any_state(make_planner: Callable[..., Planner], make_config: MakeConfig) -> None:
    config = make_config(max_epochs=2)
    planner = make_planner(config)
    steps = []
    while (step := planner.next_step()) is not None:
        steps.append(step)
    for at in (1, 5, len(steps) - 1, len(steps)):
        again = make_planner(config)
        again.load_state(json.loads(json.dumps(steps[at - 1].state_after)))
        rest = []
        while (step := again.next_step()) is not None:
            rest.append(step)
        assert rest == steps[at:]


def test_a_step_has_the_same_rows_for_any_number_of_ranks() -> None:
    rows = tuple((number,) for number in range(8))
    for dp_size in (1, 2, 4, 8):
        dealt = [rows_of_rank(rows, dp_rank=rank, dp_size=dp_size) for rank in range(dp_size)]  # type: ignore[arg-type]
        assert {len(mine) for mine in dealt} == {8 // dp_size}
        assert sorted(row for mine in dealt for row in mine) == sorted(rows)


def test_no_row_passes_the_patch_limit(make_planner: Callable[..., Planner], make_config: MakeConfig) -> None:
    planner = make_planner(make_config(packing=PackingConfig(seq_length=256, max_patches=60, buffer_size=16)))
    for _ in range(30):
        step = planner.next_step()
        assert step is not None
        assert all(sum(s.patches for s in row) <= 60 for row in step.rows)
        assert all(sum(s.length for s in row) <= 256 for row in step.rows)


def test_a_source_with_no_sample_that_fits_is_an_error(
    make_planner: Callable[..., Planner], make_config: MakeConfig
) -> None:
    config = make_config(packing=PackingConfig(seq_length=8, buffer_size=4))
    with pytest.raises(DataError, match="'pictures' has no sample that fits a row of 8 tokens"):
        make_planner(config).next_step()


def test_speed_settings_do_not_change_the_plan(make_planner: Callable[..., Planner], make_config: MakeConfig) -> None:
    config = make_config()
    faster = replace(config, num_threads=0, prefetch_packs=1)
    assert samples(make_planner(config), 5) == samples(make_planner(faster), 5)
    assert samples(make_planner(config), 5) != samples(make_planner(replace(config, seed=4)), 5)


def test_one_source_alone_is_read_shard_after_shard(
    make_planner: Callable[..., Planner], make_config: MakeConfig
) -> None:
    config = make_config()
    source: SourceConfig = replace(config.sources[0], max_epochs=1)
    planner = make_planner(
        replace(
            config,
            sources=(source,),
            shuffle_window=1,
            packing=PackingConfig(seq_length=256, buffer_size=1, balance_steps=1),
        )
    )
    order = [s.shard for s in samples(planner, 100)]
    assert sum(a != b for a, b in pairwise(order)) == 3


def test_the_largest_sample_fits_whichever_shard_holds_it(
    make_planner: Callable[..., Planner], make_config: MakeConfig, tmp_path: Path
) -> None:
    rows = []
    for number in range(40):  # one sample a shard; more shards than are looked at for the average
        side = 112 if number == 1 else 28
        Image.new("RGB", (side, side)).save(tmp_path / f"{number}.png")
        turns = [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "ab " * 20}]
        rows.append({"image": f"{number}.png", "conversations": turns})
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    write_shards(tmp_path / "rows.json", tmp_path / "shards", format="llava", samples_per_shard=1)
    index_folder(tmp_path / "shards")
    config = make_config(
        sources=(SourceConfig(name="one", path=tmp_path / "shards", max_epochs=1),),
        image=ImageConfig(min_pixels=28 * 28, max_pixels=112 * 112),
        packing=PackingConfig(seq_length=128, buffer_size=8),
    )
    planner = make_planner(config)
    assert len(samples(planner, 60)) == 40
    assert planner.max_patches == 64  # 112 x 112 pixels
    assert not planner.dropped


def test_samples_are_reported_once_they_are_in_a_row(
    make_planner: Callable[..., Planner], make_config: MakeConfig
) -> None:
    planner = make_planner(make_config())
    placed = Counter(make_config().sources[sample.source].name for sample in samples(planner, 3))
    assert planner.figures(planner.state())["samples_by_source"] == placed
    assert planner.drawn.total() > placed.total()
