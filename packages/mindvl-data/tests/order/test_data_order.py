# SPDX-License-Identifier: Apache-2.0
"""DataOrder: shares, order, epochs, its state; without reading any content."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mindvl_data import (
    DataConfig,
    DataError,
    ImageConfig,
    PackingConfig,
    SourceConfig,
    Tokenizer,
    index_directory,
    write_shards,
)
from mindvl_data.order.balance import balance_order
from mindvl_data.order.data_order import DataOrder, OrderedSample, OrderedStep, packs_of_rank
from mindvl_data.order.demand import Demand, combine
from mindvl_data.order.mixture import Mixture, effective_weights
from mindvl_data.order.packing import Packer
from mindvl_data.order.shuffle import EpochOrder, permute
from mindvl_data.order.sources import SourceIndex
from mindvl_data.order.subset import Subset
from mindvl_data.shards.files import ShardFiles
from mindvl_data.tracker import ORDER_VERSION

MakeConfig = Callable[..., DataConfig]

SHARES = [0.2, 0.3, 0.7, 0.1, 0.1, 0.2, 0.2, 0.1, 1.1, 1.1, 1.1, 0.1]


@pytest.fixture
def make_data_order(tokenizer: Tokenizer) -> Iterator[Callable[..., DataOrder]]:
    files = ShardFiles()

    def make(config: DataConfig, global_batch_size: int = 2) -> DataOrder:
        sources = [SourceIndex(s, config, tokenizer, files) for s in config.sources]
        return DataOrder(config, sources, global_batch_size=global_batch_size)

    yield make
    files.close()


def samples(data_order: DataOrder, steps: int) -> list[OrderedSample]:
    ordered = [data_order.next_step() for _ in range(steps)]
    return [sample for step in ordered if step is not None for pack in step.packs for sample in pack]


def test_the_text_share_holds(make_data_order: Callable[..., DataOrder], make_config: MakeConfig) -> None:
    data_order = make_data_order(make_config(text_share=0.2))
    samples(data_order, 60)
    drawn = data_order.drawn
    assert drawn["text"] / drawn.total() == pytest.approx(0.2, abs=1 / drawn.total())


def test_weights_can_count_tokens(make_data_order: Callable[..., DataOrder], make_config: MakeConfig) -> None:
    ordered = samples(make_data_order(make_config(weight_unit="tokens")), 80)
    tokens: Counter[int] = Counter()
    for sample in ordered:
        tokens[sample.source] += sample.length
    assert tokens[0] / tokens.total() == pytest.approx(0.5, abs=0.03)  # the buffer holds the rest


def test_each_epoch_of_a_source_has_another_order(
    make_data_order: Callable[..., DataOrder], make_config: MakeConfig
) -> None:
    config = make_config(max_epochs=2)
    ordered = samples(make_data_order(config), 500)
    by_epoch = [[(s.shard, s.sample_index) for s in ordered if (s.source, s.epoch) == (1, epoch)] for epoch in (0, 1)]
    assert sorted(by_epoch[0]) == sorted(by_epoch[1])
    assert by_epoch[0] != by_epoch[1]


def order_to_the_end(data_order: DataOrder) -> list[OrderedStep]:
    steps = []
    while (step := data_order.next_step()) is not None:
        steps.append(step)
    return steps


def stored(state: dict[str, Any]) -> dict[str, Any]:
    """A state as a checkpoint gives it back."""
    result: dict[str, Any] = json.loads(json.dumps(state))
    return result


@pytest.mark.parametrize("weight_unit", ["samples", "tokens"])
def test_a_plan_can_be_taken_up_from_any_state(
    make_data_order: Callable[..., DataOrder], make_config: MakeConfig, weight_unit: str
) -> None:
    config = make_config(max_epochs=2, weight_unit=weight_unit)
    fresh = make_data_order(config)
    start = fresh.state()
    steps = order_to_the_end(fresh)
    assert len(steps) > 8  # two windows and a part of one
    states = [start, *(step.state_after for step in steps)]
    for at, state in enumerate(states):  # at the borders of windows and inside them
        again = make_data_order(config)
        again.load_state(stored(state))
        assert stored(again.state()) == stored(state)
        assert order_to_the_end(again) == steps[at:]
        assert again.state() == steps[-1].state_after


def test_a_state_has_the_size_of_a_growing_buffer_and_the_sources_that_ended(
    make_data_order: Callable[..., DataOrder], make_config: MakeConfig
) -> None:
    config = make_config(packing=PackingConfig(seq_length=256, buffer_size=64))
    images, text = config.sources
    # Of three sources the last one ends in the middle, and the shares of the others depend on that.
    config = replace(
        config, sources=(images, replace(text, weight=2.0), replace(text, name="short", weight=0.5, max_epochs=1))
    )
    fresh = make_data_order(config)
    steps = [step for _ in range(60) if (step := fresh.next_step()) is not None]
    assert steps[30].state_after["drawn_at"][2] == [1, 0]
    for at in range(2, 48, 3):
        again = make_data_order(config)
        again.load_state(stored(steps[at - 1].state_after))
        assert [again.next_step() for _ in range(12)] == steps[at : at + 12]


def test_a_state_does_not_change_when_the_order_continues(
    make_data_order: Callable[..., DataOrder], make_config: MakeConfig
) -> None:
    data_order = make_data_order(make_config())
    first = data_order.next_step()
    assert first is not None
    kept = json.dumps(first.state_after)
    samples(data_order, 12)
    assert json.dumps(first.state_after) == kept


def test_an_epoch_holds_every_sample_once_whatever_the_steps_are(
    make_data_order: Callable[..., DataOrder], make_config: MakeConfig
) -> None:
    config = make_config(max_epochs=1)
    for global_batch_size in (1, 2, 3, 5, 8, 60):
        steps = order_to_the_end(make_data_order(config, global_batch_size))
        used = Counter((s.source, s.shard, s.sample_index) for step in steps for pack in step.packs for s in pack)
        assert len(used) == used.total() == 100
        packs = [pack for step in steps for pack in step.packs]
        assert all(len(step.packs) == global_batch_size for step in steps)
        filled = [bool(pack) for pack in packs]
        assert filled == sorted(filled, reverse=True)  # empty packs stand at the very end
        assert any(filled[-global_batch_size:])


def test_ranks_that_come_and_go_see_the_same_steps(
    make_data_order: Callable[..., DataOrder], make_config: MakeConfig
) -> None:
    config = make_config()
    data_order = make_data_order(config, 30)
    expected = [data_order.next_step() for _ in range(6)]
    state, seen = make_data_order(config, 30).state(), []
    for dp_size in (2, 3, 5, 10, 1, 6):  # one step with each number of ranks, restarted in between
        by_rank = []
        for rank in range(dp_size):
            data_order = make_data_order(config, 30)
            data_order.load_state(stored(state))
            step = data_order.next_step()
            assert step is not None
            by_rank.append(packs_of_rank(step.packs, dp_rank=rank, dp_size=dp_size))
        state = step.state_after
        seen.append(tuple(pack for packs in zip(*by_rank, strict=True) for pack in packs))
    assert seen == [step.packs for step in expected if step is not None]


def test_when_an_epoch_is_over_the_next_one_begins(
    make_data_order: Callable[..., DataOrder], make_config: MakeConfig
) -> None:
    config = make_config()
    only_text = replace(config, sources=(config.sources[1],))
    data_order = make_data_order(only_text)
    while min(cursor[0] for cursor in data_order.state()["drawn_at"]) < 3:
        assert data_order.next_step() is not None
    used = Counter((s.epoch, s.shard, s.sample_index) for s in samples(data_order, 200))
    assert max(used.values()) == 1


def test_the_balance_window_moves_packs_and_changes_none(
    make_data_order: Callable[..., DataOrder], make_config: MakeConfig
) -> None:
    config = make_config()
    plain = replace(config, packing=replace(config.packing, balance_steps=1))
    packs = [[pack for _ in range(4) for pack in take_step(data_order).packs]
            for data_order in (make_data_order(config, 8), make_data_order(plain, 8))]  # fmt: skip
    assert packs[0] != packs[1]
    assert sorted(packs[0]) == sorted(packs[1])
    pairs = [[abs(patches(one) - patches(other)) for one, other in batched(side)] for side in packs]
    assert sum(pairs[0]) < sum(pairs[1])


def take_step(data_order: DataOrder) -> OrderedStep:
    step = data_order.next_step()
    assert step is not None
    return step


def patches(pack: tuple[OrderedSample, ...]) -> int:
    return sum(sample.patches for sample in pack)


def batched(packs: list[Any]) -> list[tuple[Any, Any]]:
    return list(zip(packs[::2], packs[1::2], strict=True))


def test_first_and_fraction_use_the_same_samples_in_every_epoch(
    make_data_order: Callable[..., DataOrder], make_config: MakeConfig
) -> None:
    config = make_config()
    images, text = config.sources
    config = replace(
        config, sources=(replace(images, first=40, fraction=0.5, max_epochs=3), replace(text, first=7, max_epochs=3))
    )
    ordered = samples(make_data_order(config), 999)
    for source, count in ((0, 20), (1, 7)):
        by_epoch = [
            {(s.shard, s.sample_index) for s in ordered if (s.source, s.epoch) == (source, epoch)} for epoch in range(3)
        ]
        assert by_epoch[0] == by_epoch[1] == by_epoch[2]
        assert len(by_epoch[0]) == count
        assert sum(s.source == source for s in ordered) == 3 * count
    assert {(s.shard, s.sample_index) for s in ordered if s.source == 1} == {(0, pack) for pack in range(7)}
    assert all(16 * s.shard + s.sample_index < 40 for s in ordered if s.source == 0)
    other_seed = samples(make_data_order(replace(config, seed=9)), 999)
    assert {s[0:4] for s in other_seed} == {s[0:4] for s in ordered}


@pytest.mark.parametrize("done", [2, 4, 5, 7])  # inside windows and between them
def test_a_changed_source_continues_with_its_next_epoch_and_the_others_lose_nothing(
    make_data_order: Callable[..., DataOrder], make_config: MakeConfig, done: int
) -> None:
    config = make_config(max_epochs=3)
    data_order = make_data_order(config)
    before = [take_step(data_order) for _ in range(done)]
    state = stored(before[-1].state_after)
    again = make_data_order(config)
    again.load_state(state, changed_sources={"text"})
    middle = stored(again.state())
    after = order_to_the_end(again)
    used = [sample for step in (*before, *after) for pack in step.packs for sample in pack]
    images = Counter(sample for sample in used if sample.source == 0)
    assert (len(images), images.total()) == (180, 180)  # three epochs, each sample once
    text_before = [s for step in before for pack in step.packs for s in pack if s.source == 1]
    text_after = [s for step in after for pack in step.packs for s in pack if s.source == 1]
    assert max(s.epoch for s in text_before) < min(s.epoch for s in text_after)
    drawn_epochs = state["drawn_at"][1][0] + (state["drawn_at"][1][1] > 0)
    assert len(text_after) == 40 * (3 - drawn_epochs) > 0
    drawn = state["drawn"]["text"]
    assert again.dropped["text: data changed"] == drawn - len(text_before)
    assert again.figures(again.state())["samples_by_source"] == {
        "images": 180,
        "text": len(text_before) + len(text_after),
    }
    assert all(all(step.packs) for step in after[:-1])
    resumed = make_data_order(config)
    resumed.load_state(middle)
    assert order_to_the_end(resumed) == after


def test_a_changed_source_of_which_nothing_was_drawn_loses_no_epoch(
    make_data_order: Callable[..., DataOrder], make_config: MakeConfig
) -> None:
    config = make_config(max_epochs=1)
    fresh = make_data_order(config)
    again = make_data_order(config)
    again.load_state(stored(fresh.state()), changed_sources={"text"})
    assert order_to_the_end(again) == order_to_the_end(fresh)


def test_a_changed_source_gets_back_what_its_dropped_samples_took(
    make_data_order: Callable[..., DataOrder], make_config: MakeConfig
) -> None:
    config = make_config()
    state = stored(take_step(make_data_order(config)).state_after)
    waiting = sum(sample[0] == 1 for sample in state["buffer"])
    assert waiting > 2
    again = make_data_order(config)
    again.load_state(state, changed_sources={"text"})
    # A sample takes 1 from its source and gives each of the two sources its share of it.
    images, text = state["owed"]
    assert again.state()["owed"] == pytest.approx([images - waiting / 2, text + waiting / 2])


def test_a_sample_of_the_length_of_a_pack_is_used(
    make_data_order: Callable[..., DataOrder], make_config: MakeConfig
) -> None:
    longest = max(sample.length for sample in samples(make_data_order(make_config(max_epochs=1)), 999))
    config = make_config(max_epochs=1, packing=PackingConfig(seq_length=longest, buffer_size=16, pad_multiple=1))
    data_order = make_data_order(config)
    ordered = samples(data_order, 999)
    assert (len(ordered), max(sample.length for sample in ordered)) == (100, longest)
    assert not data_order.dropped


def test_a_changed_source_without_a_next_epoch_ends(
    make_data_order: Callable[..., DataOrder], make_config: MakeConfig
) -> None:
    data_order = make_data_order(make_config(max_epochs=1))
    state = stored(take_step(data_order).state_after)
    again = make_data_order(make_config(max_epochs=1))
    again.load_state(state, changed_sources={"text"})
    assert all(sample.source == 0 for step in order_to_the_end(again) for pack in step.packs for sample in pack)


def test_a_step_has_the_same_packs_for_any_number_of_ranks() -> None:
    packs = tuple((number,) for number in range(8))
    for dp_size in (1, 2, 4, 8):
        assigned = [packs_of_rank(packs, dp_rank=rank, dp_size=dp_size) for rank in range(dp_size)]  # type: ignore[arg-type]
        assert {len(mine) for mine in assigned} == {8 // dp_size}
        assert sorted(pack for mine in assigned for pack in mine) == sorted(packs)


def test_no_pack_passes_the_patch_limit(make_data_order: Callable[..., DataOrder], make_config: MakeConfig) -> None:
    data_order = make_data_order(make_config(packing=PackingConfig(seq_length=256, max_patches=60, buffer_size=16)))
    for _ in range(30):
        step = data_order.next_step()
        assert step is not None
        assert all(sum(s.patches for s in pack) <= 60 for pack in step.packs)
        assert all(sum(s.length for s in pack) <= 256 for pack in step.packs)


def test_a_source_with_no_sample_that_fits_is_an_error(
    make_data_order: Callable[..., DataOrder], make_config: MakeConfig
) -> None:
    config = make_config(packing=PackingConfig(seq_length=8, buffer_size=4))
    with pytest.raises(DataError, match="'images' has no sample that fits a pack of 8 tokens"):
        make_data_order(config).next_step()


def test_speed_settings_do_not_change_the_plan(
    make_data_order: Callable[..., DataOrder], make_config: MakeConfig
) -> None:
    config = make_config()
    faster = replace(config, num_threads=0, prefetch_packs=1)
    assert samples(make_data_order(config), 5) == samples(make_data_order(faster), 5)
    assert samples(make_data_order(config), 5) != samples(make_data_order(replace(config, seed=4)), 5)


def test_one_source_alone_is_read_shard_after_shard(
    make_data_order: Callable[..., DataOrder], make_config: MakeConfig
) -> None:
    config = make_config()
    source: SourceConfig = replace(config.sources[0], max_epochs=1)
    data_order = make_data_order(
        replace(
            config,
            sources=(source,),
            shuffle_window=1,
            packing=PackingConfig(seq_length=256, buffer_size=1, balance_steps=1),
        )
    )
    order = [s.shard for s in samples(data_order, 100)]
    assert sum(a != b for a, b in pairwise(order)) == 3


def test_the_largest_sample_fits_whichever_shard_holds_it(
    make_data_order: Callable[..., DataOrder], make_config: MakeConfig, tmp_path: Path
) -> None:
    records = []
    for number in range(40):  # one sample a shard; more shards than are looked at for the average
        side = 112 if number == 1 else 28
        Image.new("RGB", (side, side)).save(tmp_path / f"{number}.png")
        turns = [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "ab " * 20}]
        records.append({"image": f"{number}.png", "conversations": turns})
    (tmp_path / "records.json").write_text(json.dumps(records))
    write_shards(tmp_path / "records.json", tmp_path / "shards", format="llava", samples_per_shard=1)
    index_directory(tmp_path / "shards")
    config = make_config(
        sources=(SourceConfig(name="one", path=tmp_path / "shards", max_epochs=1),),
        image=ImageConfig(min_pixels=28 * 28, max_pixels=112 * 112),
        packing=PackingConfig(seq_length=128, buffer_size=8),
    )
    data_order = make_data_order(config)
    assert len(samples(data_order, 60)) == 40
    assert not data_order.dropped


def test_a_sample_above_what_packs_may_have_is_used_among_text_alone(
    make_data_order: Callable[..., DataOrder], make_config: MakeConfig, tmp_path: Path
) -> None:
    for side in (28, 336):  # the large one is in none of the records that are looked at for the average
        Image.new("RGB", (side, side)).save(tmp_path / f"{side}.png")
    turns = [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "ab " * 20}]
    records = [{"image": f"{336 if number == 301 else 28}.png", "conversations": turns} for number in range(600)]
    (tmp_path / "records.json").write_text(json.dumps(records))
    write_shards(tmp_path / "records.json", tmp_path / "shards", format="llava", samples_per_shard=600)
    index_directory(tmp_path / "shards")
    config = make_config(
        sources=(SourceConfig(name="one", path=tmp_path / "shards", max_epochs=1),),
        image=ImageConfig(min_pixels=28 * 28, max_pixels=336 * 336),
        packing=PackingConfig(seq_length=1024, buffer_size=16),
    )
    data_order = make_data_order(config)
    assert data_order.max_patches < 576  # 336 x 336 pixels
    found = []
    while (step := data_order.next_step()) is not None:
        found += [[sample.patches for sample in pack] for pack in step.packs]
    assert sum(map(len, found)) == 600
    assert [pack for pack in found if sum(pack) > data_order.max_patches] == [[576]]
    assert not data_order.dropped


def test_samples_are_reported_once_they_are_in_a_pack(
    make_data_order: Callable[..., DataOrder], make_config: MakeConfig
) -> None:
    data_order = make_data_order(make_config())
    placed = Counter(make_config().sources[sample.source].name for sample in samples(data_order, 3))
    assert data_order.figures(data_order.state())["samples_by_source"] == placed
    assert data_order.drawn.total() > placed.total()


def test_other_derived_figures_than_at_the_checkpoint_are_refused(
    make_data_order: Callable[..., DataOrder], make_config: MakeConfig
) -> None:
    config = make_config()
    step = make_data_order(config).next_step()
    assert step is not None
    state = json.loads(json.dumps(step.state_after))
    make_data_order(config).load_state(state)
    state["derived"][2] += 1
    with pytest.raises(DataError, match=r"data\.sources: tokens per sample.* at the checkpoint and are"):
        make_data_order(config).load_state(state)


def test_another_order_needs_another_version(each_sum: Callable[[], Iterator[None]]) -> None:
    """Fails when anything that decides the order changes: raise ORDER_VERSION then, and put the new digest here.

    The order has to be the same on every Python and numpy, so the digest is one for all of them.
    """
    for _ in each_sum():
        assert (ORDER_VERSION, digest_of_the_order()) == (7, "5917faa5add2afe9")


def digest_of_the_order() -> str:
    digest = hashlib.sha256()
    order = EpochOrder([700, 300, 500], window=256, seed=3, source="a", epoch=1)
    for part in order.positions(100, 900):
        digest.update(part.astype("<i8").tobytes())
    subset = Subset(np.array([700, 300, 500]), first=1300, fraction=0.3, source="a")
    for shard in range(3):
        digest.update(subset.rows(shard, np.arange(subset.sizes[shard])).astype("<i8").tobytes())
    # Shares that binary floats do not hold, of as many sources as make the order of additions matter.
    demands = [Demand(samples=7, tokens=1000 * n + 1, patches=333 * (n % 4), largest=100 * n) for n in range(1, 13)]
    for weight_unit, text_share in (("samples", None), ("tokens", 0.3)):
        weights = effective_weights(SHARES, [number % 3 == 0 for number in range(12)], text_share)
        demand = combine(demands, weights, weight_unit=weight_unit)
        digest.update(repr((weights, demand)).encode())
        mixture = Mixture(weights, unit=demand[0] if weight_unit == "tokens" else 1.0)
        for drawn in range(2000):
            if drawn in (700, 1400):
                mixture.exhaust(drawn // 700)
            source = mixture.next_source()
            assert source is not None
            mixture.took(source, demands[source].mean_tokens if weight_unit == "tokens" else 1.0)
            digest.update(bytes([source]))
    packer: Packer[int] = Packer(capacity=2048, max_patches=1600, patches_per_token=0.4, buffer_size=64)
    # No generator of numpy's: its streams may change from version to version.
    lengths, patches = 30 + permute(np.arange(2000), 2000, 1) * 870 // 2000, permute(np.arange(2000), 2000, 2) // 5
    loads = []
    for number, length in enumerate(lengths.tolist()):
        packer.add(number, length, int(patches[number]))
        while packer.is_full:
            pack = packer.next_pack()
            loads.append(int(patches[pack].sum()))
            digest.update(np.array(pack, "<i8").tobytes())
    digest.update(balance_order(np.array(loads[:64]), global_batch_size=16, width=8).astype("<i8").tobytes())
    return digest.hexdigest()[:16]


def test_a_whole_plan_does_not_depend_on_how_this_python_adds(
    make_data_order: Callable[..., DataOrder],
    make_config: MakeConfig,
    shard_directories: dict[str, Path],
    each_sum: Callable[[], Iterator[None]],
) -> None:
    sources = tuple(
        SourceConfig(name=str(n), path=shard_directories["text" if n % 3 else "images"], weight=share)
        for n, share in enumerate(SHARES)
    )
    config = make_config(sources=sources)
    found = []
    for _ in each_sum():
        data_order = make_data_order(config)
        found.append(
            [sample for _ in range(40) if (step := data_order.next_step()) for pack in step.packs for sample in pack]
        )
    assert len(found) == 2
    assert found[0] == found[1]
