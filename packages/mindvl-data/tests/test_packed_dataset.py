# SPDX-License-Identifier: Apache-2.0
"""PackedDataset: the loader's packs through DataLoader and WebLoader, with and without workers, resumed anywhere."""

import dataclasses
import json
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import webdataset as wds
from torch.utils.data import DataLoader

from mindvl_data import Batch, DataConfig, DataError, Loader, PackedDataset

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")]

MakeConfig = Callable[..., DataConfig]
OPTIONS: dict[str, Any] = {"global_batch_size": 4, "dp_rank": 1, "dp_size": 2, "position_kind": "mrope"}


@pytest.fixture
def config(make_config: MakeConfig) -> DataConfig:
    return make_config(num_threads=0)


def first_packs(config: DataConfig, count: int | None, **options: Any) -> list[Batch]:
    with Loader(config, **(OPTIONS | options)) as loader:
        return list(islice(loader, count))


def assert_same(ours: Iterable[Batch], theirs: Iterable[Batch]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert (a.step, a.samples) == (b.step, b.samples)
        for name, value in a.model_inputs().items():
            other = b.model_inputs()[name]
            assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other


@pytest.mark.parametrize("make_loader", [DataLoader, wds.WebLoader])
@pytest.mark.parametrize("num_workers", [0, 1, 3])  # 3 do not divide the two packs of a step
def test_packs_and_their_order_are_the_loaders(config: DataConfig, make_loader: Any, num_workers: int) -> None:
    loader = make_loader(PackedDataset(config, **OPTIONS), batch_size=None, num_workers=num_workers)
    assert_same(islice(loader, 9), first_packs(config, 9))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_ranks_share_a_step_without_overlap(config: DataConfig, num_workers: int) -> None:
    seen: list[Any] = []
    for rank in range(2):
        dataset = PackedDataset(config, **(OPTIONS | {"dp_rank": rank}))
        packs = list(islice(DataLoader(dataset, batch_size=None, num_workers=num_workers), 4))
        assert_same(packs, first_packs(config, 4, dp_rank=rank))
        seen += [(s.source, s.epoch, s.shard, s.sample_index) for pack in packs for s in pack.samples]
    assert len(seen) == len(set(seen))


@pytest.mark.parametrize("num_workers", [0, 3])
def test_the_end_of_the_data_is_the_loaders(make_config: MakeConfig, num_workers: int) -> None:
    config = make_config(num_threads=0, max_epochs=1)
    packs = list(DataLoader(PackedDataset(config, **OPTIONS), batch_size=None, num_workers=num_workers))
    assert len(packs) > 3
    assert_same(packs, first_packs(config, None))


@pytest.mark.parametrize(("before", "after"), [(0, 2), (3, 0), (2, 3)])
def test_a_run_stopped_after_any_pack_continues_after_its_last_complete_step(
    config: DataConfig, before: int, after: int
) -> None:
    all_packs = first_packs(config, 12)
    dataset = PackedDataset(config, **OPTIONS)
    packs = list(islice(DataLoader(dataset, batch_size=None, num_workers=before), 6))
    for number, pack in enumerate(packs, 1):
        state = json.loads(json.dumps(dataset.state_dict(pack.to("cpu"))))
        resumed = PackedDataset(config, **OPTIONS)
        resumed.load_state_dict(state)
        complete = number - number % 2
        rest = list(islice(DataLoader(resumed, batch_size=None, num_workers=after), 4))
        assert_same(rest, all_packs[complete : complete + 4])


def test_states_are_exchanged_with_the_loader(config: DataConfig) -> None:
    dataset = PackedDataset(config, **OPTIONS)
    with Loader(config, **OPTIONS) as loader:
        packs = [next(loader) for _ in range(4)]
        dataset.load_state_dict(loader.state_dict())
        assert dataset.state_dict() == loader.state_dict()
        assert_same(islice(dataset, 2), [next(loader) for _ in range(2)])
        loader.load_state_dict(dataset.state_dict())
        assert next(loader).step == packs[-1].step + 2


def test_without_workers_the_state_is_that_of_the_newest_pack_and_an_iteration_starts_where_it_was_loaded(
    config: DataConfig,
) -> None:
    dataset = PackedDataset(config, **OPTIONS)
    with Loader(config, **OPTIONS) as loader:
        assert dataset.state_dict() == loader.state_dict()
    for batch in islice(dataset, 3):
        assert dataset.state_dict() == dataset.state_dict(batch)
    assert next(iter(dataset)).step == 1
    dataset.load_state_dict(dataset.state_dict(batch))
    assert next(iter(dataset)).step == 2


def test_workers_that_read_ahead_do_not_make_a_wrong_state(config: DataConfig) -> None:
    dataset = PackedDataset(config, **OPTIONS)
    batch = next(iter(DataLoader(dataset, batch_size=None, num_workers=1)))
    with pytest.raises(DataError, match=r"Pass the last trained batch: state_dict\(batch\)"):
        dataset.state_dict()
    with pytest.raises(DataError, match="batch of step 1 has no loader_state"):
        dataset.state_dict(dataclasses.replace(batch, loader_state=None))


def test_spawned_workers_get_the_state_too(config: DataConfig) -> None:
    dataset = PackedDataset(config, **OPTIONS)
    dataset.load_state_dict(dataset.state_dict(list(islice(dataset, 2))[-1]))
    loader = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    assert_same(islice(loader, 2), first_packs(config, 4)[2:])
    with pytest.raises(DataError, match="workers read ahead"):
        dataset.state_dict()


def test_persistent_workers_that_a_state_cannot_reach_are_refused(config: DataConfig) -> None:
    dataset = PackedDataset(config, **OPTIONS)
    loader = DataLoader(dataset, batch_size=None, num_workers=1, persistent_workers=True)
    dataset.load_state_dict(dataset.state_dict(list(islice(loader, 2))[-1]))
    with pytest.raises(DataError, match="Create a new DataLoader after load_state_dict"):
        next(iter(loader))


def test_a_state_of_another_recipe_is_refused_before_a_worker_starts(
    config: DataConfig, make_config: MakeConfig
) -> None:
    dataset = PackedDataset(config, **OPTIONS)
    with pytest.raises(DataError, match="seed"):
        dataset.load_state_dict(PackedDataset(make_config(num_threads=0, seed=4), **OPTIONS).state_dict())
    assert next(iter(dataset)).step == 1


def test_settings_are_checked_before_a_worker_starts(config: DataConfig) -> None:
    with pytest.raises(DataError, match="global_batch_size=3"):
        PackedDataset(config, **(OPTIONS | {"global_batch_size": 3}))


def test_an_audit_log_is_written_without_workers_and_refused_with_them(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(num_threads=0, audit_log=tmp_path / "audit.jsonl")
    dataset = PackedDataset(config, global_batch_size=1, position_kind="rope")
    assert not config.audit_log.exists()
    list(islice(dataset, 2))
    assert len(config.audit_log.read_text().splitlines()) == 2
    with pytest.raises(DataError, match=r"num_workers=2\. Use num_workers=0, or omit audit_log"):
        next(iter(DataLoader(dataset, batch_size=None, num_workers=2)))
