# SPDX-License-Identifier: Apache-2.0
"""Loader: order, resume, ranks, bad samples."""

import dataclasses
import gc
import io
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mindvl_data import (
    IGNORE_INDEX,
    Batch,
    DataConfig,
    DataError,
    Loader,
    PackingConfig,
    SourceConfig,
    Tokenizer,
    index_directory,
    write_shards,
)
from mindvl_data.audit_log import AuditLog
from mindvl_data.measure import measure_directory
from mindvl_data.order.data_order import DataOrder
from mindvl_data.order.sources import source_rules
from mindvl_data.pack_builder import PackBuilder
from mindvl_data.quarantine import FAILED_ELSEWHERE, read_quarantine
from mindvl_data.shards.index import open_index
from mindvl_data.shards.sealed import seal

pytestmark = pytest.mark.slow

MakeConfig = Callable[..., DataConfig]


def take(loader: Loader, count: int) -> list[Batch]:
    return [next(loader) for _ in range(count)]


def assert_same(ours: Iterable[Batch], theirs: Iterable[Batch]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.samples == b.samples
        assert a.step == b.step
        for name, value in a.model_inputs().items():
            other = b.model_inputs()[name]
            assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other


def flags(pack: Batch) -> list[bool]:
    return [segment.failed for segment in pack.samples]


def figures(loader: Loader) -> dict[str, Any]:
    """The report without what one rank did since it started."""
    return {name: value for name, value in loader.report().items() if name not in ("reads", "failed_samples")}


def test_a_batch_has_the_promised_shapes_and_types(make_config: MakeConfig, tokenizer: Tokenizer) -> None:
    with Loader(make_config(), global_batch_size=2, position_kind="mrope") as loader:
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
        assert batch.num_loss_tokens == int((batch.labels != IGNORE_INDEX).sum()) > 0
        assert [s.length for s in batch.samples] == batch.cu_seqlens.diff().tolist()[: len(batch.samples)]


def test_labels_never_reach_over_the_end_of_a_segment(make_config: MakeConfig) -> None:
    with Loader(make_config(), global_batch_size=1, position_kind="rope") as loader:
        for batch in take(loader, 6):
            last = batch.cu_seqlens[1:].long() - 1
            assert (batch.labels[last] == IGNORE_INDEX).all()
            in_loss = batch.labels[:-1] != IGNORE_INDEX
            assert (batch.labels[:-1][in_loss] == batch.input_ids[1:][in_loss]).all()


@pytest.mark.parametrize("seed", range(4))
def test_stopping_anywhere_and_going_on_equals_never_stopping(make_config: MakeConfig, seed: int) -> None:
    random_source = random.Random(seed)
    config = make_config(num_threads=2, prefetch_packs=7)
    with Loader(config, global_batch_size=3, position_kind="rope") as loader:
        expected = take(loader, 24)
    done: list[Batch] = []
    state = None
    while len(done) < 24:
        with Loader(config, global_batch_size=3, position_kind="rope") as loader:
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
    with Loader(config, global_batch_size=4, position_kind="rope") as loader:
        expected = take(loader, 12)
        state = loader.state_dict()
    ranks = []
    for rank in range(dp_size):
        with Loader(config, global_batch_size=4, dp_rank=rank, dp_size=dp_size, position_kind="rope") as loader:
            ranks.append(take(loader, 12 // dp_size))
            assert loader.state_dict() == state
    assert_same([ranks[i % dp_size][i // dp_size] for i in range(12)], expected)


def test_an_epoch_uses_every_sample_exactly_once(make_config: MakeConfig) -> None:
    with Loader(make_config(max_epochs=1), global_batch_size=4, position_kind="rope") as loader:
        used = Counter((s.source, s.shard, s.sample_index) for batch in loader for s in batch.samples)
        report = loader.report()
    assert len(used) == 100
    assert set(used.values()) == {1}
    assert report["samples_by_source"] == {"images": 60, "text": 40}


def test_a_state_of_a_finished_run_stays_finished(make_config: MakeConfig) -> None:
    config = make_config(max_epochs=1)
    with Loader(config, global_batch_size=4, position_kind="rope") as loader:
        list(loader)
        state = loader.state_dict()
    with Loader(config, global_batch_size=4, position_kind="rope") as loader:
        loader.load_state_dict(state)
        assert list(loader) == []


def test_a_sample_longer_than_a_pack_is_dropped_and_counted(make_config: MakeConfig) -> None:
    config = make_config(max_epochs=1, packing=PackingConfig(seq_length=40, buffer_size=8))
    with Loader(config, global_batch_size=1, position_kind="rope") as loader:
        lengths = [s.length for batch in loader for s in batch.samples]
        dropped = loader.report()["dropped"]
    assert max(lengths) <= 40
    assert sum(dropped.values()) + len(lengths) == 100
    assert set(dropped) == {"images: too long", "text: too long"}


def test_a_sample_that_cannot_be_decoded_becomes_a_placeholder_without_loss(
    make_config: MakeConfig, shard_directories: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for file in shard_directories["images"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    shard = open_index(tmp_path).shards[0]
    content = bytearray(shard.path.read_bytes())
    content[int(shard.members["offset"][1]) + 40] ^= 0xFF
    shard.path.write_bytes(content)
    config = make_config(sources=(SourceConfig(name="images", path=tmp_path, max_epochs=1),))
    whole = make_config(sources=(SourceConfig(name="images", path=shard_directories["images"], max_epochs=1),))
    with caplog.at_level(logging.WARNING), Loader(config, global_batch_size=1, position_kind="rope") as loader:
        batches = list(loader)
        assert loader.report()["failed_samples"] == 1
    assert "crc32" in caplog.text
    assert "shard-000000.tar: sample 0" in caplog.text
    with Loader(whole, global_batch_size=1, position_kind="rope") as loader:
        for batch, good in zip(batches, loader, strict=True):
            assert batch.cu_seqlens.tolist() == good.cu_seqlens.tolist()
            for start, segment in zip(batch.cu_seqlens.tolist(), batch.samples, strict=False):
                if segment.failed:
                    assert (batch.labels[start : start + segment.length] == IGNORE_INDEX).all()
                    assert batch.num_loss_tokens < good.num_loss_tokens


@pytest.fixture
def half_a_jpeg(tmp_path: Path) -> SourceConfig:
    """Six images; the third lacks its second half, but has a header and an end, so that the index takes it."""
    directory = tmp_path / "raw"
    directory.mkdir()
    records = []
    for number in range(6):
        file = io.BytesIO()
        noise = np.random.default_rng(number).integers(0, 256, (56, 56, 3), dtype=np.uint8)
        Image.fromarray(noise).save(file, "JPEG")
        content = file.getvalue()
        (directory / f"{number}.jpg").write_bytes(
            content[: len(content) // 2] + b"\xff\xd9" if number == 2 else content
        )
        turns = [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": f"number {number}"}]
        records.append({"id": f"n{number}", "image": f"{number}.jpg", "conversations": turns})
    (directory / "records.json").write_text(json.dumps(records))
    write_shards(directory / "records.json", tmp_path / "shards", format="llava")
    index_directory(tmp_path / "shards")
    return SourceConfig(name="half", path=tmp_path / "shards", max_epochs=1)


def test_without_pixels_a_pack_keeps_all_else(make_config: MakeConfig, shard_directories: dict[str, Path]) -> None:
    source = SourceConfig(name="images", path=shard_directories["images"], max_epochs=1)
    config = make_config(sources=(source,))
    with (
        Loader(config, global_batch_size=2, position_kind="mrope") as loader,
        Loader(config, global_batch_size=2, position_kind="mrope", with_pixels=False) as bare,
    ):
        for batch, pack in zip(loader, bare, strict=True):
            assert len(pack.pixel_values) == 0
            assert_same([dataclasses.replace(pack, pixel_values=batch.pixel_values)], [batch])
        assert loader.state_dict() == bare.state_dict()


def test_what_one_process_cannot_decode_the_others_can_leave_out_too(
    make_config: MakeConfig, half_a_jpeg: SourceConfig, tmp_path: Path
) -> None:
    log = tmp_path / "quarantine.jsonl"
    config = make_config(sources=(half_a_jpeg,), packing=PackingConfig(seq_length=48, buffer_size=4))
    logged = dataclasses.replace(config, quarantine_log=log)
    with (
        Loader(config, global_batch_size=2, position_kind="mrope") as loader,
        Loader(logged, global_batch_size=2, position_kind="mrope", with_pixels=False) as bare,
    ):
        packs, others = list(loader), list(bare)
        assert sum(sum(flags(pack)) for pack in packs) == 1
        assert not any(any(flags(pack)) for pack in others)  # it decodes nothing, so nothing fails
        place, broken = next((number, pack) for number, pack in enumerate(packs) if any(flags(pack)))
        with pytest.raises(StopIteration):  # only packs of the newest step are remembered
            bare.rebuild(others[0], flags(others[0]))
        number = max(n for n, pack in enumerate(others) if pack.samples)
        agreed = bare.rebuild(others[number], [True] * len(others[number].samples))
        assert agreed.num_loss_tokens == 0
        assert all(flags(agreed))
        assert {use.reason for use in read_quarantine(log)} == {FAILED_ELSEWHERE}
    with Loader(config, global_batch_size=2, position_kind="mrope", with_pixels=False) as bare:
        other = take(bare, place + 1)[place]
        agreed = bare.rebuild(other, flags(broken))
        for name in ("input_ids", "labels", "position_ids", "cu_seqlens", "image_grid_thw"):
            assert torch.equal(getattr(agreed, name), getattr(broken, name)), name
        assert agreed.num_loss_tokens == broken.num_loss_tokens < other.num_loss_tokens
        assert bare.report()["failed_samples"] == 1


def test_the_report_does_not_depend_on_restarts_or_ranks(make_config: MakeConfig) -> None:
    with Loader(make_config(), global_batch_size=2, position_kind="rope") as loader:
        batches = take(loader, 12)
        expected = figures(loader)
    tokens = [sum(s.length for s in b.samples) for b in batches]
    visual = [len(b.pixel_values) // 4 for b in batches]
    assert expected["packs"] == 12
    assert expected["packing_efficiency"] == pytest.approx(sum(tokens) / 12 / 256)
    assert expected["visual_tokens"]["max"] == max(visual)
    assert expected["visual_tokens"]["mean"] == pytest.approx(sum(visual) / 12)
    with Loader(make_config(), global_batch_size=2, dp_rank=1, dp_size=2, position_kind="rope") as loader:
        take(loader, 2)
        state = loader.state_dict()
    with Loader(make_config(), global_batch_size=2, position_kind="rope") as loader:
        loader.load_state_dict(state)
        take(loader, 8)
        assert figures(loader) == expected


def test_too_many_bad_samples_stop_the_run(
    make_config: MakeConfig, shard_directories: dict[str, Path], tmp_path: Path
) -> None:
    for file in shard_directories["images"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for shard in open_index(tmp_path).shards:
        content = bytearray(shard.path.read_bytes())
        for offset in shard.members["offset"].tolist():
            content[offset] ^= 1
        shard.path.write_bytes(content)
    config = make_config(sources=(SourceConfig(name="images", path=tmp_path),))
    with (
        Loader(config, global_batch_size=1, position_kind="rope") as loader,
        pytest.raises(DataError, match=r"\d+ of \d+ samples of data-parallel rank 0 failed to decode"),
    ):
        take(loader, 100)


def test_threads_change_nothing(make_config: MakeConfig) -> None:
    with Loader(make_config(num_threads=0), global_batch_size=2, position_kind="rope") as loader:
        expected = take(loader, 10)
    with Loader(make_config(num_threads=3, prefetch_packs=9), global_batch_size=2, position_kind="rope") as loader:
        assert_same(take(loader, 10), expected)


def test_without_threads_there_is_none(make_config: MakeConfig) -> None:
    before = threading.enumerate()
    with Loader(make_config(num_threads=0), global_batch_size=2, position_kind="rope") as loader:
        take(loader, 3)
        assert new_threads(before) == []
    with Loader(make_config(num_threads=2), global_batch_size=2, position_kind="rope") as loader:
        take(loader, 3)
        assert new_threads(before) == ["mindvl-data-0", "mindvl-data-1", "mindvl-order-0"]
    assert new_threads(before) == []


def new_threads(before: list[threading.Thread]) -> list[str]:
    """Names of threads that were started later; threads of earlier tests may end at any time."""
    return sorted(thread.name for thread in threading.enumerate() if thread not in before)


def test_a_loader_that_is_forgotten_leaves_no_thread(make_config: MakeConfig) -> None:
    before = threading.enumerate()
    loader = Loader(make_config(num_threads=2), global_batch_size=2, position_kind="rope")
    next(loader)
    del loader
    gc.collect()
    assert new_threads(before) == []


@pytest.mark.parametrize("num_threads", [0, 2])
def test_what_goes_wrong_in_the_plan_reaches_the_caller_at_every_call(
    make_config: MakeConfig, num_threads: int
) -> None:
    config = make_config(packing=PackingConfig(seq_length=8, buffer_size=4), num_threads=num_threads)
    with Loader(config, global_batch_size=2, position_kind="rope") as loader:
        for _ in range(2):
            with pytest.raises(DataError, match="has no sample that fits a pack of 8 tokens") as caught:
                next(loader)
            assert "_next_usable" in "".join(traceback.format_exception(caught.value))


def test_a_closed_loader_refuses_and_does_not_wait(make_config: MakeConfig) -> None:
    loader = Loader(make_config(), global_batch_size=2, position_kind="rope")
    next(loader)
    loader.close()
    loader.close()
    with pytest.raises(DataError, match="this loader was closed"):
        next(loader)


@pytest.mark.parametrize(("bound", "most"), [(1, 1), (1 << 30, 6)])
def test_packs_wait_within_the_byte_bound_but_one_always_does(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, bound: int, most: int
) -> None:
    made = []
    build = PackBuilder.build
    monkeypatch.setattr(PackBuilder, "build", lambda *given: (made.append(1), build(*given))[1])
    config = make_config(num_threads=2, prefetch_packs=6, prefetch_bytes=bound)
    with Loader(config, global_batch_size=2, position_kind="rope") as loader:
        for taken in range(1, 9):
            next(loader)
            assert len(made) <= taken + most
    assert len(made) >= 8 + (most > 1)


def test_a_byte_bound_holds_fewer_packs_of_many_images(make_config: MakeConfig) -> None:
    bound = 200_000  # a pack of 256 tokens with images alone has about 600,000 bytes
    config = make_config(num_threads=2, prefetch_packs=50, prefetch_bytes=bound)
    with Loader(config, global_batch_size=2, position_kind="rope") as loader:
        for _ in range(10):
            next(loader)
            waiting = [entry.num_bytes for entry in loader._pending]
            assert len(waiting) <= 1 or sum(waiting) <= 1.1 * bound


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_ranks_together_read_the_bytes_of_the_samples_used_and_no_more(
    make_config: MakeConfig, shard_directories: dict[str, Path], dp_size: int
) -> None:
    config = make_config(max_epochs=1)
    with Loader(config, global_batch_size=4, position_kind="rope") as loader:
        list(loader)  # measures lengths, if they are not stored
    read, extents, together = 0, 0, []
    indexes = {name: open_index(directory) for name, directory in shard_directories.items()}
    shards = {(name, shard.name): shard for name, index in indexes.items() for shard in index.shards}
    for rank in range(dp_size):
        with Loader(config, global_batch_size=4, dp_rank=rank, dp_size=dp_size, position_kind="rope") as loader:
            mine = [(s.source, s.shard, s.sample_index) for batch in loader for s in batch.samples]
            read += loader.report()["reads"]["bytes_read"]
        entries = [shards[source, shard].samples[pack] for source, shard, pack in mine]
        extents += sum(int(entry["length"]) + 512 for entry in entries)  # a tar header goes before each sample
        together += mine
    assert len(together) == len(set(together)) == 100
    assert extents <= read <= 1.02 * extents


def test_restoring_plans_no_more_than_a_fresh_start(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    orders, steps, packs = [], [], []
    plan, pack = DataOrder._pack_window, DataOrder._next_pack
    init = DataOrder.__init__
    monkeypatch.setattr(DataOrder, "__init__", lambda *a, **k: (orders.append(1), init(*a, **k))[1])
    monkeypatch.setattr(DataOrder, "_pack_window", lambda self: (steps.append(1), plan(self))[1])
    monkeypatch.setattr(DataOrder, "_next_pack", lambda self: (packs.append(1), pack(self))[1])
    config = make_config(num_threads=0)

    def cost(state: dict[str, Any] | None) -> tuple[int, int, int]:
        for counted in (orders, steps, packs):
            counted.clear()
        with Loader(config, global_batch_size=2, position_kind="rope") as loader:
            if state is not None:
                loader.load_state_dict(state)
            next(loader)
        return len(orders), len(steps), len(packs)

    fresh = cost(None)
    assert fresh[0] == 1
    with Loader(config, global_batch_size=2, position_kind="rope") as loader:
        for _ in range(1, 9):
            take(loader, 2)
            assert all(ours <= theirs for ours, theirs in zip(cost(loader.state_dict()), fresh, strict=True))


def test_a_state_can_be_loaded_in_the_middle_of_a_run(make_config: MakeConfig) -> None:
    with Loader(make_config(), global_batch_size=2, position_kind="rope") as loader:
        first = take(loader, 4)
        state = loader.state_dict()
        expected = take(loader, 6)
        loader.load_state_dict(state)
        assert_same(take(loader, 6), expected)
        assert_same(first[:0], [])


@pytest.mark.parametrize("is_running", [False, True])
def test_a_state_that_was_loaded_in_part_gives_no_pack_until_one_is_loaded(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, is_running: bool
) -> None:
    with Loader(make_config(), global_batch_size=2, position_kind="rope") as loader:
        take(loader, 4)
        state = loader.state_dict()
        expected = take(loader, 4)

    def load_half(data_order: DataOrder, state: dict[str, Any], **_: Any) -> None:
        data_order._step = state["step"]
        raise KeyError("drawn")

    with Loader(make_config(), global_batch_size=2, position_kind="rope") as loader:
        take(loader, 3 if is_running else 0)
        with monkeypatch.context() as patched:
            patched.setattr(DataOrder, "load_state", load_half)
            with pytest.raises(KeyError, match="drawn"):
                loader.load_state_dict(state)
        for _ in range(2):
            with pytest.raises(DataError, match="loading a state failed halfway"):
                next(loader)
        loader.load_state_dict(state)
        assert_same(take(loader, 4), expected)


def test_after_the_end_the_next_round_is_not_stuck(make_config: MakeConfig) -> None:
    with Loader(make_config(max_epochs=1), global_batch_size=4, position_kind="rope") as loader:
        start = loader.state_dict()
        first = list(loader)
        assert next(loader, None) is None
        assert list(loader) == []
        loader.load_state_dict(start)
        assert_same(list(loader), first)


def test_the_number_of_ranks_may_change_at_every_restart(make_config: MakeConfig) -> None:
    config = make_config(num_threads=1, prefetch_packs=2)
    with Loader(config, global_batch_size=24, position_kind="rope") as loader:
        expected = take(loader, 24 * 4)
    state, done = None, []
    for dp_size in (2, 8, 3, 1):
        ranks = []
        for rank in range(dp_size):
            with Loader(config, global_batch_size=24, dp_rank=rank, dp_size=dp_size, position_kind="rope") as loader:
                if state is not None:
                    loader.load_state_dict(json.loads(json.dumps(state)))
                ranks.append(take(loader, 24 // dp_size))
                after = loader.state_dict()
        state = after
        done += [ranks[i % dp_size][i // dp_size] for i in range(24)]
    assert_same(done, expected)


def test_a_bad_sample_is_quarantined_by_the_rank_that_met_it_and_ranks_stay_equal(
    make_config: MakeConfig, shard_directories: dict[str, Path], tmp_path: Path
) -> None:
    directory = tmp_path / "images"
    shutil.copytree(shard_directories["images"], directory)
    shard = open_index(directory).shards[1]
    content = bytearray(Path(shard.path).read_bytes())
    for pack in (2, 5):
        content[int(shard.samples["offset"][pack])] ^= 0xFF
    Path(shard.path).write_bytes(content)
    log = tmp_path / "quarantine.jsonl"
    source = SourceConfig(name="images", path=directory, max_epochs=2)
    config = make_config(sources=(source,), quarantine_log=log)
    states, packs = [], []
    for rank in range(2):
        with Loader(config, global_batch_size=2, dp_rank=rank, dp_size=2, position_kind="rope") as loader:
            packs.append([(batch.step, batch.samples) for batch in loader])
            states.append(loader.state_dict())
    assert states[0] == states[1]
    met = {(step, s.sample_index) for mine in packs for step, samples in mine for s in samples if s.failed}
    assert len(met) == 4  # two samples, two epochs
    lines = [json.loads(line) for file in tmp_path.glob("quarantine.rank*.jsonl") for line in file.open()]
    assert {(line["step"], line["sample_index"]) for line in lines} == met
    assert {(sample.shard, sample.sample_index) for sample in read_quarantine(log)} == {
        (shard.name, 2),
        (shard.name, 5),
    }
    assert {sample.reason for sample in read_quarantine(log)} == {"the crc32 of the content differs from the index"}


FEW_FILES = """
import json, os, resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))  # what most systems give
from mindvl_data import DataConfig, Loader, PackingConfig, SourceConfig
directories, tokenizer = [Path(p) for p in sys.argv[1:-1]], Path(sys.argv[-1])
sources = tuple(SourceConfig(name=f.name, path=f, max_epochs=1) for f in directories)
config = DataConfig(sources=sources, tokenizer=tokenizer, packing=PackingConfig(seq_length=256, buffer_size=64))
with Loader(config, global_batch_size=4, position_kind="rope") as loader:
    used = sum(len(batch.samples) for batch in loader)
    files = len(os.listdir("/proc/self/fd"))
# Not ru_maxrss: that begins with the memory of whoever started this process.
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({"used": used, "files": files, "peak_mb": peak / 1024}))
"""


def test_two_thousand_shards_stay_within_few_files_and_a_gigabyte(
    tokenizer: Tokenizer, tokenizer_directory: Path, make_config: MakeConfig, tmp_path: Path
) -> None:
    directories = [tmp_path / f"source{number}" for number in range(2)]
    for directory in directories:  # one shard, measured, a thousand times under other names
        raw = tmp_path / f"{directory.name}.jsonl"
        raw.write_text(json.dumps({"text": "ab " * 40}))
        write_shards(raw, directory, format="text")
        index_directory(directory)
        measure_directory(directory, tokenizer, source_rules(SourceConfig(name="a", path=directory), make_config()))
        files = [file for file in directory.iterdir() if file.name.startswith("shard-000000")]
        manifest = json.loads((directory / "manifest.json").read_text())
        for number in range(1, 1000):
            for file in files:
                os.link(file, directory / file.name.replace("000000", f"{number:06d}"))
            manifest["shards"].append(manifest["shards"][0] | {"name": f"shard-{number:06d}.tar"})
        manifest |= {"samples": 1000, "bytes": 1000 * manifest["bytes"]}
        del manifest["checksum"]
        (directory / "manifest.json").write_bytes(seal(manifest))
    command = [sys.executable, "-c", FEW_FILES, *map(str, directories), str(tokenizer_directory)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    figures = json.loads(ended.stdout)
    assert figures["used"] == 2000
    assert figures["files"] < 400  # two loaders fit below the limit
    assert figures["peak_mb"] < 1000


def test_packs_that_cannot_be_distributed_to_the_ranks_are_refused(make_config: MakeConfig) -> None:
    with pytest.raises(DataError, match="multiple of dp_size"):
        Loader(make_config(), global_batch_size=3, dp_size=2, position_kind="rope")
    with pytest.raises(DataError, match="dp_size=0"):
        Loader(make_config(), global_batch_size=1, dp_size=0, position_kind="rope")


def test_a_directory_without_an_index_is_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(sources=(SourceConfig(name="new", path=tmp_path),))
    with pytest.raises(DataError, match="mindvl data index"):
        Loader(config, global_batch_size=1, position_kind="rope")
    with pytest.raises(DataError, match="no shards"):
        index_directory(tmp_path)


def test_a_tokenizer_larger_than_the_models_vocabulary_is_refused(make_config: MakeConfig) -> None:
    with Loader(make_config(), global_batch_size=1, position_kind="rope") as loader:
        highest = max(int(next(loader).input_ids.max()) for _ in range(4))
    with Loader(make_config(), global_batch_size=1, position_kind="rope", vocab_size=highest + 1) as loader:
        list(islice(loader, 4))
    with (
        Loader(make_config(), global_batch_size=1, position_kind="rope", vocab_size=highest) as loader,
        pytest.raises(DataError, match=f"hold token {highest}, which lies outside the model's vocabulary of {highest}"),
    ):
        list(islice(loader, 4))


def test_the_audit_log_is_on_disk_before_a_state_is_returned(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(AuditLog, "sync", lambda self: synced.append(self._file.size()))
    path = tmp_path / "audit.jsonl"
    with Loader(make_config(audit_log=path), global_batch_size=1, position_kind="rope") as loader:
        next(loader)
        loader.state_dict()
        assert synced == [path.stat().st_size]
