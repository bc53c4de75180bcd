# SPDX-License-Identifier: Apache-2.0
"""Loader: order, resume, ranks, bad samples."""

import json
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from mindvl_data import IGNORE_INDEX, Batch, DataConfig, DataError, Loader, PackingConfig, SourceConfig, index_folder
from mindvl_data.shards.index import open_index

MakeConfig = Callable[..., DataConfig]


def take(loader: Loader, count: int) -> list[Batch]:
    return [next(loader) for _ in range(count)]


def assert_same(ours: Iterable[Batch], theirs: Iterable[Batch]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.segments == b.segments
        assert a.step == b.step
        for name, value in a.model_inputs().items():
            other = b.model_inputs()[name]
            assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other


def figures(loader: Loader) -> dict[str, Any]:
    """The report without what one rank did since it started."""
    return {name: value for name, value in loader.report().items() if name not in ("reads", "bad_samples")}


def test_a_batch_has_the_promised_shapes_and_types(make_config: MakeConfig, tokenizer) -> None:
    with Loader(make_config(), packs_per_step=2, position_kind="mrope") as loader:
        batches = take(loader, 8)
    for batch in batches:
        tokens = len(batch.input_ids)
        assert tokens % 8 == 0
        assert tokens <= 256
        assert batch.position_ids.shape == (3, tokens)
        assert batch.cu_seqlens.dtype == torch.int32
        assert batch.cu_seqlens[0] == 0
        assert batch.cu_seqlens[-1] == tokens
        assert batch.max_seqlen == int(batch.cu_seqlens.diff().max())
        assert batch.pixel_values.dtype == torch.uint8
        assert batch.pixel_values.shape == (int(batch.image_grid_thw.prod(-1).sum()), 588)
        assert int((batch.input_ids == tokenizer.image_pad_id).sum()) == len(batch.pixel_values) // 4
        assert batch.num_label_tokens == int((batch.labels != IGNORE_INDEX).sum()) > 0
        assert [s.length for s in batch.segments] == batch.cu_seqlens.diff().tolist()[: len(batch.segments)]


def test_labels_never_reach_over_the_end_of_a_segment(make_config: MakeConfig) -> None:
    with Loader(make_config(), packs_per_step=1, position_kind="rope") as loader:
        for batch in take(loader, 6):
            last = batch.cu_seqlens[1:].long() - 1
            assert (batch.labels[last] == IGNORE_INDEX).all()
            learned = batch.labels[:-1] != IGNORE_INDEX
            assert (batch.labels[:-1][learned] == batch.input_ids[1:][learned]).all()


@pytest.mark.parametrize("seed", range(4))
def test_stopping_anywhere_and_going_on_equals_never_stopping(make_config: MakeConfig, seed: int) -> None:
    random_source = random.Random(seed)
    config = make_config(num_threads=2, prefetch_packs=7)
    with Loader(config, packs_per_step=3, position_kind="rope") as loader:
        expected = take(loader, 24)
    done: list[Batch] = []
    state = None
    while len(done) < 24:
        with Loader(config, packs_per_step=3, position_kind="rope") as loader:
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
            steps = min(random_source.randint(1, 4), (24 - len(done)) // 3)
            done += take(loader, 3 * steps)
            take(loader, random_source.randint(0, 2))  # part of a step that a crash throws away
            state = loader.state_dict()
    assert_same(done, expected)


@pytest.mark.parametrize("dp_size", [2, 4])
def test_any_number_of_ranks_gives_the_same_global_batches(make_config: MakeConfig, dp_size: int) -> None:
    config = make_config(num_threads=0)
    with Loader(config, packs_per_step=4, position_kind="rope") as loader:
        expected = take(loader, 12)
        state = loader.state_dict()
    ranks = []
    for rank in range(dp_size):
        with Loader(config, packs_per_step=4, dp_rank=rank, dp_size=dp_size, position_kind="rope") as loader:
            ranks.append(take(loader, 12 // dp_size))
            assert loader.state_dict() == state
    assert_same([ranks[i % dp_size][i // dp_size] for i in range(12)], expected)


def test_an_epoch_uses_every_sample_exactly_once(make_config: MakeConfig) -> None:
    with Loader(make_config(max_epochs=1), packs_per_step=4, position_kind="rope") as loader:
        used = Counter((s.source, s.shard, s.row) for batch in loader for s in batch.segments)
        report = loader.report()
    assert len(used) == 100
    assert set(used.values()) == {1}
    assert report["samples_by_source"] == {"pictures": 60, "text": 40}


def test_a_state_of_a_finished_run_stays_finished(make_config: MakeConfig) -> None:
    config = make_config(max_epochs=1)
    with Loader(config, packs_per_step=4, position_kind="rope") as loader:
        list(loader)
        state = loader.state_dict()
    with Loader(config, packs_per_step=4, position_kind="rope") as loader:
        loader.load_state_dict(state)
        assert list(loader) == []


def test_a_sample_longer_than_a_row_is_dropped_and_counted(make_config: MakeConfig) -> None:
    config = make_config(max_epochs=1, packing=PackingConfig(seq_length=40, buffer_size=8))
    with Loader(config, packs_per_step=1, position_kind="rope") as loader:
        lengths = [s.length for batch in loader for s in batch.segments]
        dropped = loader.report()["dropped"]
    assert max(lengths) <= 40
    assert sum(dropped.values()) + len(lengths) == 100
    assert set(dropped) == {"pictures: too long", "text: too long"}


def test_a_sample_that_cannot_be_decoded_becomes_a_placeholder_without_loss(
    make_config: MakeConfig, shard_folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for file in shard_folders["pictures"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    shard = open_index(tmp_path).shards[0]
    content = bytearray(shard.path.read_bytes())
    content[int(shard.members["offset"][1]) + 40] ^= 0xFF
    shard.path.write_bytes(content)
    config = make_config(sources=(SourceConfig(name="pictures", path=tmp_path, max_epochs=1),))
    whole = make_config(sources=(SourceConfig(name="pictures", path=shard_folders["pictures"], max_epochs=1),))
    with caplog.at_level(logging.WARNING), Loader(config, packs_per_step=1, position_kind="rope") as loader:
        batches = list(loader)
        assert loader.report()["bad_samples"] == 1
    assert "crc32" in caplog.text
    assert "shard-000000.tar row 0" in caplog.text
    with Loader(whole, packs_per_step=1, position_kind="rope") as loader:
        for batch, good in zip(batches, loader, strict=True):
            assert batch.cu_seqlens.tolist() == good.cu_seqlens.tolist()
            for start, segment in zip(batch.cu_seqlens.tolist(), batch.segments, strict=False):
                if segment.bad:
                    assert (batch.labels[start : start + segment.length] == IGNORE_INDEX).all()
                    assert batch.num_label_tokens < good.num_label_tokens


def test_the_report_does_not_depend_on_restarts_or_ranks(make_config: MakeConfig) -> None:
    with Loader(make_config(), packs_per_step=2, position_kind="rope") as loader:
        batches = take(loader, 12)
        expected = figures(loader)
    tokens = [sum(s.length for s in b.segments) for b in batches]
    visual = [len(b.pixel_values) // 4 for b in batches]
    assert expected["rows"] == 12
    assert expected["fill"] == pytest.approx(sum(tokens) / 12 / 256)
    assert expected["visual_tokens"]["max"] == max(visual)
    assert expected["visual_tokens"]["mean"] == pytest.approx(sum(visual) / 12)
    with Loader(make_config(), packs_per_step=2, dp_rank=1, dp_size=2, position_kind="rope") as loader:
        take(loader, 2)
        state = loader.state_dict()
    with Loader(make_config(), packs_per_step=2, position_kind="rope") as loader:
        loader.load_state_dict(state)
        take(loader, 8)
        assert figures(loader) == expected


def test_too_many_bad_samples_stop_the_run(
    make_config: MakeConfig, shard_folders: dict[str, Path], tmp_path: Path
) -> None:
    for file in shard_folders["pictures"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for shard in open_index(tmp_path).shards:
        content = bytearray(shard.path.read_bytes())
        for offset in shard.members["offset"].tolist():
            content[offset] ^= 1
        shard.path.write_bytes(content)
    config = make_config(sources=(SourceConfig(name="pictures", path=tmp_path),))
    with (
        Loader(config, packs_per_step=1, position_kind="rope") as loader,
        pytest.raises(DataError, match=r"\d+ of \d+ samples could not be decoded"),
    ):
        take(loader, 100)


def test_threads_change_nothing(make_config: MakeConfig) -> None:
    with Loader(make_config(num_threads=0), packs_per_step=2, position_kind="rope") as loader:
        expected = take(loader, 10)
    with Loader(make_config(num_threads=3, prefetch_packs=9), packs_per_step=2, position_kind="rope") as loader:
        assert_same(take(loader, 10), expected)


def test_packs_that_cannot_be_dealt_to_the_ranks_are_refused(make_config: MakeConfig) -> None:
    with pytest.raises(DataError, match="multiple of dp_size"):
        Loader(make_config(), packs_per_step=3, dp_size=2, position_kind="rope")


def test_a_folder_without_an_index_is_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(sources=(SourceConfig(name="new", path=tmp_path),))
    with pytest.raises(DataError, match="mindvl data index"):
        Loader(config, packs_per_step=1, position_kind="rope")
    with pytest.raises(DataError, match="no shards"):
        index_folder(tmp_path)
